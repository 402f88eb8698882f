""" The table of all recipes, in Markdown. """
from recipes import table

print(table(), end="")
