""" The table of all recipes, in Markdown: python -m rivals """
from quant import ROW, TENSOR, Operand, Recipe
from recipes import RECIPES


def table() -> str:
    """ RECIPES as a table in Markdown: a row for each recipe, a column for each operand. """
    names = ["X", "W", "dY", "Wᵀ", "dYᵀ", "Xᵀ"]
    head = ["recipe", *names, "Wᵀ, Xᵀ from", "outlier channels", "rotated, around"]

    def cells(operands: tuple[Operand | None, ...]) -> list[str]:
        words = [described(op) for op in operands]
        first = [words.index(text) for text in words]
        return [text if i == k or text == "-" else f"as {names[k]}"
                for i, (text, k) in enumerate(zip(words, first))]

    rows = [[f"`{name}`", *cells(r.operands),
             "-" if not any(r.operands) else "Q2(W), Q1(X)" if r.align else "W, X", described(r.outlier),
             turned(r)]
            for name, r in RECIPES.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def described(op: Operand | str | None) -> str:
    """ An operand in a few words: grid, block, what shares an outer scale, scale and rule, and sr. """
    if not isinstance(op, Operand):
        return op or "-"
    outer = {0: "", TENSOR: "in tensor", ROW: "in row"}.get(op.outer, f"in {op.outer}")
    words = [op.grid, f"{op.block[0]}x{op.block[1]}", outer, op.scale, op.rule, op.rounding]
    return " ".join(word for word in words if word not in ("", "rtn"))


def turned(r: Recipe) -> str:
    """ The rotations of Y, dX and dW, and what is around the linear. """
    words = [f"{product} by {size} {signs}" for product, size, signs in
             zip(("Y", "dX", "dW"), r.rotate, r.signs) if size]
    return ", ".join([*words, *r.around]) or "-"


if __name__ == "__main__":
    print(table(), end="")
