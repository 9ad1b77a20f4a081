"""What launch commands, logs and reports state, as facts with their lines and as the `Config` that exposure judges.

One reader for every tool: `signs` find facts in a line, `derived` adds what follows from them, `config` makes a
`Config` of them, and `launch` reads the flags of a whole command. It stands above `exposure` and below the tools.
"""
