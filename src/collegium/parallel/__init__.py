"""Where experts live and how tokens reach them: ``placement`` says who holds what, one file a strategy moves rows."""
