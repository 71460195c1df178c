"""What a pass runs on: devices, launches, memory, captured and compiled calls. Nothing here knows a format."""
