python3 - <<'EOF'
import json
assert json.load(open('jade.json')) == json.loads(r"""[{"id": "1", "label": "maple"}, {"id": "2", "label": "river"}, {"id": "3", "label": "ember"}, {"id": "4", "label": "jade"}, {"id": "5", "label": "delta"}, {"id": "6", "label": "pearl"}]""")
EOF
