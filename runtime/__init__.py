"""Operators and their providers, installed as ``hot_compile.runtime``."""

if __name__ != "hot_compile.runtime":
    raise ImportError(
        f"got `import {__name__}`: this package is installed as `hot_compile.runtime`; "
        "import that name (a second copy would register every operator twice)"
    )
