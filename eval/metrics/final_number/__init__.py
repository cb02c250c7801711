"""The metric `final_number`: a folder that the library `evaluate` loads by its path."""
