heron
