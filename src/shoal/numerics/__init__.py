"""Numbers that must not depend on the layout."""
