"""Decoding made visible: `wedlm trace` and `wedlm generate`.

`record` keeps every step of a generation, `saved` is its form as JSON, `page` and `terminal` replay it; `answers` is
the work of `wedlm generate`.
"""
