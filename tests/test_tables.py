"""Tables show cells as they are, also where these look like markup."""

from hot_compile.tables import PlainTable, as_html, rendered


def test_cells_are_no_markup():
    table = PlainTable("[bold]title", "[red]", "size", right={"size"})
    table.add("blocks[0]", "[/]")
    text = rendered([table, "a [line]"])
    for part in ("[bold]title", "[red]", "blocks[0]", "[/]", "a [line]"):
        assert part in text


def test_in_a_notebook_wide_tables_scroll():
    table = PlainTable("title", "a")
    table.add("<b>")
    code = as_html([table])
    assert code.startswith("<pre")
    assert "&lt;b&gt;" in code
