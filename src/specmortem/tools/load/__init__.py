"""A load client for any OpenAI-compatible server, and what it saw: crashes, loops, early ends, lost acceptance.

`driver.Driver` sends the rounds of a `settings.Settings` and returns a `result.Result`: each request that was sent has
an id and exactly one `outcome.Outcome`. Nothing is sent twice: no retry, no redirect, no kept connection. This room
knows servers only by HTTP; nothing in it imports torch.
"""
