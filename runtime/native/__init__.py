"""How the native libraries are made: what they consist of, where compilers are, building."""
