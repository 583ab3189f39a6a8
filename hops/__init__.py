"""The higher-order operators: one file each, with all of an operator's rules in it."""

if __name__ != "hopflow.hops":
    raise ImportError(
        f"`{__name__}` is a folder of hopflow, and its name is `hopflow.hops`: "
        "import that. (The root of the checkout is on sys.path, and need not be.)",
        name=__name__,
    )
