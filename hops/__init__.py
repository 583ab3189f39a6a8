"""The higher-order operators: one file for each, with all its rules."""

if __name__ != "hopflow.hops":
    raise ImportError(
        f"`{__name__}` is a folder of hopflow, and its name is `hopflow.hops`: "
        "import that. (The root of the checkout is on sys.path, and need not be.)",
        name=__name__,
    )
