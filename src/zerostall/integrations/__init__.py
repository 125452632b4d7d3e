"""Other libraries' ways to save and load, with zerostall underneath. Their users import them, zerostall never does."""
