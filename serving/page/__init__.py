"""The page at `/` of `wedlm serve`: a conversation, a race of two decoders, replays. `page` serves it."""
