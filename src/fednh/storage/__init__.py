"""Everything that is written to disk, and how it survives crashes."""
