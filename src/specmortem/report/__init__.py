"""From notebook to page: run it with papermill, keep what it found, render one self-contained HTML file."""
