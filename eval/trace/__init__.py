"""The work of `wedlm generate --trace`: `record` keeps every forward of a generation, `page` replays it."""
