"""The training engine: data order, loop, checkpoints, accelerate. It knows nothing of distillation."""
