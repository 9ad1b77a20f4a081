"""`specmortem new`: a folder with a whole incident in it, to be changed into a real one."""
