"""The work of `wedlm push`: a folder is checked as someone without this package loads it, then uploaded to the Hub."""
