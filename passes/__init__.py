"""Graph stages of the backend, installed as ``hot_compile.passes``."""

if __name__ != "hot_compile.passes":
    raise ImportError(
        f"got `import {__name__}`: this package is installed as `hot_compile.passes`; "
        "import that name (a second copy would register every operator twice)"
    )
