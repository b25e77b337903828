"""Other libraries' closed lists of backends: importing one of these adds "hot" to one of them."""
