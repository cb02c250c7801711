"""`wedlm report`: how good and how fast a checkpoint decodes, against AR decoding of the same weights."""
