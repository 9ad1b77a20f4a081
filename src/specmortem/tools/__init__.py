"""What is built on the layers below: audit, triage, load and engine. They reach incidents through the registry."""
