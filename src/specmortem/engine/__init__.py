"""The small parts of an engine that the incidents need."""
