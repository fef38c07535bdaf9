python3 - <<'EOF'
import json
assert json.load(open('cedar.json')) == json.loads(r"""[{"id": "1", "label": "olive"}, {"id": "2", "label": "larch"}, {"id": "3", "label": "quartz"}, {"id": "4", "label": "birch"}, {"id": "5", "label": "maple"}]""")
EOF
