""" The earlier remedies against oscillating weights, and the controls of OsciReset. """
