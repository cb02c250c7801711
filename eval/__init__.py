"""Tasks, measuring, the sweep over decoding settings, the report, and the work of `wedlm generate`."""
