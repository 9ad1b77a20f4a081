"""One folder an incident; each exports `INCIDENT` and imports neither another incident nor, here, torch."""
