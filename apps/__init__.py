"""What people use without writing code: `wedlm chat`, `wedlm demo` in the browser, `wedlm push`."""
