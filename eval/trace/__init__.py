"""The work of `wedlm trace`: `record` keeps every forward of a generation, `saved` is its JSON, `page` replays it."""
