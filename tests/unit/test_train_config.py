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
        ("schedule", "linear"),
        ("decay_fraction", 1.5),
        ("final_learning_rate_fraction", -0.1),
        ("max_grad_norm", -1.0),
        ("ema_decay", 1.0),
        ("ema_decay", -0.1),
        ("mixed_precision", "fp8"),
        ("seed", -1),
        ("log_every_steps", 0),
        ("eval_every_steps", -1),
        ("select_by", "alpha"),
        ("select_by", " "),
        ("patience", 0),
        ("patience", 3),
        ("checkpoint_every_steps", -1),
        ("keep_checkpoints", 0),
    ],
)
def test_impossible_values_are_refused(field: str, value: object) -> None:
    values = {"output": "run", field: value}
    with pytest.raises(ValueError, match=rf"^{field}: .*{value!r}.*; \w+"):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_warm_up_and_decay_must_fit_together() -> None:
    fractions = {"warmup_fraction": 0.4, "decay_fraction": 0.7}
    with pytest.raises(ValueError, match=r"^decay_fraction: 0\.7 .* warmup_fraction 0\.4"):
        TrainConfig(output="run", schedule="wsd", **fractions)  # type: ignore[arg-type]
    TrainConfig(output="run", schedule="cosine", **fractions)  # type: ignore[arg-type]
    for warmup in range(11):
        fractions = {"warmup_fraction": warmup / 10, "decay_fraction": 1 - warmup / 10}
        TrainConfig(output="run", schedule="wsd", **fractions)  # type: ignore[arg-type]


def test_patience_and_selection_say_what_they_need() -> None:
    with pytest.raises(ValueError, match=r"^patience: 3 .*; give select_by and eval_every_steps"):
        TrainConfig(output="run", patience=3, eval_every_steps=5)
    with pytest.raises(ValueError, match=r"^patience: 3 .*; give select_by and eval_every_steps"):
        TrainConfig(output="run", patience=3, select_by="alpha")
    with pytest.raises(ValueError, match=r"^select_by: .*; give eval_every_steps"):
        TrainConfig(output="run", select_by="alpha")
    TrainConfig(output="run", patience=3, select_by="alpha", eval_every_steps=5)


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate: nan"):
        TrainConfig(output="run", learning_rate=float("nan"))


def test_sensible_values_pass_and_trackers_become_a_tuple() -> None:
    config = TrainConfig(output="run", batch_size=7, micro_batch_size=3, trackers=["a"])  # type: ignore[arg-type]
    assert config.trackers == ("a",)


def test_a_length_without_a_prediction_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length: 1"):
        LanguageModelConfig(model="m", data="d", max_length=1, train=TrainConfig(output="run"))
