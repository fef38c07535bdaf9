python3 - <<'EOF'
import json
assert json.load(open('grove.json')) == json.loads(r"""[{"id": "1", "label": "amber"}, {"id": "2", "label": "river"}, {"id": "3", "label": "quartz"}, {"id": "4", "label": "north"}, {"id": "5", "label": "birch"}, {"id": "6", "label": "delta"}]""")
EOF
