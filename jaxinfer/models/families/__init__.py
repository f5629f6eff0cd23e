"""One file per family of checkpoints: its config as a `DecoderSpec`, its tensors as a `LoadPlan`."""
