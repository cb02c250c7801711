"""What people use without writing code: `wedlm chat` on a terminal, `wedlm demo` in the browser."""
