"""The console script `spec-train`."""

from dataclasses import fields

from .config import LanguageModelConfig
from .console import RESUMES, Parser, instantiated, run

PROGRAM = "spec-train"


def main(argv: list[str] | None = None) -> int:
    """Trains a language model with cross-entropy; `spec-train --help` lists the options."""
    return run(PROGRAM, lambda: _train(argv), RESUMES)


def _train(argv: list[str] | None) -> None:
    parser = Parser(prog=PROGRAM, description="Train a language model with cross-entropy.")
    parser.add_argument("--config", action="config", help="YAML file; options after it override its values")
    parser.add_class_arguments(LanguageModelConfig)
    options = instantiated(parser, argv)
    config = LanguageModelConfig(**{f.name: options[f.name] for f in fields(LanguageModelConfig)})

    # torch and transformers take seconds to import, which --help and a mistyped option need not wait for.
    from .language_model import train_language_model

    train_language_model(config)
