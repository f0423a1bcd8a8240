"""The command line's verbs for checkpoints: generate, accuracy, demo."""
