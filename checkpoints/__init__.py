"""Reading, writing and formats of checkpoints, of models of any class."""
