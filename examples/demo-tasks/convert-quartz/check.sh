python3 - <<'EOF'
import json
assert json.load(open('quartz.json')) == json.loads(r"""[{"id": "1", "label": "birch"}, {"id": "2", "label": "cedar"}, {"id": "3", "label": "slate"}, {"id": "4", "label": "larch"}, {"id": "5", "label": "larch"}]""")
EOF
