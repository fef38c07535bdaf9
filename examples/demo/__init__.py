"""What `bridle demo` runs; shipped in the wheel as `bridle/assets/demo`."""
