"""Values that cannot be meant are refused with the field, the value and a remedy."""

import pytest

from train.config import LanguageModelConfig, TrainConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("output", " "),
        ("num_epochs", 0.0),
        ("max_steps", 0),
        ("batch_size", 0),
        ("micro_batch_size", -1),
        ("optimizer", "sgd"),
        ("learning_rate", 0.0),
        ("muon_learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("warmup_fraction", 1.5),
        ("final_learning_rate_fraction", -0.1),
        ("max_grad_norm", -1.0),
        ("mixed_precision", "fp8"),
        ("seed", -1),
        ("log_every_steps", 0),
        ("eval_every_steps", -1),
        ("checkpoint_every_steps", -1),
        ("keep_checkpoints", 0),
    ],
)
def test_impossible_values_are_refused(field: str, value: object) -> None:
    values = {"output": "run", field: value}
    with pytest.raises(ValueError, match=rf"^{field}: .*{value!r}.*; \w+"):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate: nan"):
        TrainConfig(output="run", learning_rate=float("nan"))


def test_sensible_values_pass_and_trackers_become_a_tuple() -> None:
    config = TrainConfig(output="run", batch_size=7, micro_batch_size=3, trackers=["a"])  # type: ignore[arg-type]
    assert config.trackers == ("a",)


def test_a_length_without_a_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length: 1"):
        LanguageModelConfig(model="m", data="d", max_length=1, train=TrainConfig(output="run"))
