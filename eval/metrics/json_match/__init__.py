"""The metric `json_match`: a folder that the library `evaluate` loads by its path."""
