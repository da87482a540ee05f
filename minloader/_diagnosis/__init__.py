"""What only looks at a loader: its stats as text, its timeline, trials of it, an audit."""
