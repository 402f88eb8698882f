"""
What other papers do, to compare TetraJet-v2 with. Importing this package puts it all into the open tables of
the lesson. A file of your own with an idea of your own is one more name in the line below (docs/forking.md).

    python -m rivals      prints the table of all recipes
"""
from rivals import hcp, recipes, remedies, rules    # noqa: F401
