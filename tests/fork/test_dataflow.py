"""The data flow: what counts as a write to a parameter, and how far a parameter is followed and named."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import HEAD, body, marked, rows

WRITES = {
    "method in place": "params[name].copy_(tensor)  #! name as in-place",
    "through .data": "params[name].data.copy_(tensor)  #! name as in-place",
    "several methods": "self.w.zero_().add_(1)  #! self.w as in-place",
    "index in place": "self.w.index_copy_(0, tensor, tensor)  #! self.w as in-place",
    "element": "params[name][0] = tensor  #! name as subscript",
    "slice": "params[name].data[:2] = tensor  #! name as subscript",
    "list of rows": "self.w.data[[1, 2]] = tensor  #! self.w as subscript",
    "augmented element": "self.w[0] += 1  #! self.w as subscript",
    "augmented attribute": "self.w.data *= 2  #! self.w as augmented",
    "augmented name": "p = params[name]\np += tensor  #! name as augmented",
    "new data": "params[name].data = tensor  #! name as data",
    "new parameter": "self.w = nn.Parameter(tensor)  #! self.w as rebind",
    "new parameter elsewhere": "self.layer.extra = nn.Parameter(tensor)  #! self.layer.extra as rebind",
    "no parameter any more": "self.w = None  #! self.w as rebind",
    "another's parameter": "self.layer.proj.weight = self.layers[0].proj.weight  #! self.layer.proj.weight as rebind",
    "setattr": "setattr(self, 'w', nn.Parameter(tensor))  #! self.w as rebind",
    "setattr of several": (
        "for each in ('w', 'v'):\n    p = nn.Parameter(tensor)\n"
        "    setattr(self, each, p)  #! self.v as rebind; self.w as rebind"
    ),
    "setattr by a variable": "setattr(self, name, nn.Parameter(tensor))  #! self.name as rebind",
    "register_parameter": "self.register_parameter('w', nn.Parameter(tensor))  #! self.w as rebind",
    "the table itself": "self._parameters[name] = tensor  #! self._parameters as rebind",
    "out=": "torch.add(tensor, 1, out=params[name])  #! name as out",
    "out= several": "torch.max(tensor, 0, out=(self.w, tensor))  #! self.w as out",
    "init": "nn.init.zeros_(self.w)  #! self.w as in-place",
    "unbound method": "torch.Tensor.copy_(self.w, tensor)  #! self.w as in-place",
    "many at once": "torch._foreach_copy_([params[name], self.w], [tensor])  #! name as in-place; self.w as in-place",
    "state": "self.layer.load_state_dict(tensor)  #! self.layer.* as load_state_dict",
    "element of a buffer": "self.mask[0] = tensor  #! self.mask as subscript",
    "buffer": "self.mask.copy_(tensor)  #! self.mask as in-place",
}

ALIASES = {
    "name": "p = params[name]\np.copy_(tensor)  #! name as in-place",
    "unpacked": "p, q = params[name], tensor\np.copy_(q)  #! name as in-place",
    "starred": "p, *rest = [self.w, self.w]\nrest[0].copy_(tensor)  #! self.w as in-place",
    "walrus": "if (p := params.get(name)) is not None:\n    p.copy_(tensor)  #! name as in-place",
    "choice": "p = tensor if tensor.ndim else self.w\np.copy_(tensor)  #! self.w as in-place",
    "or": "p = params.get(name) or self.w\np.copy_(tensor)  #! name as in-place; self.w as in-place",
    "get with a default": "params.get('a', self.w).fill_(0)  #! a as in-place; self.w as in-place",
    "narrow": "p = params[name].narrow(0, 0, 2)\np.copy_(tensor)  #! name as in-place",
    "split": "a, b = self.w.data.chunk(2)\nb.copy_(tensor)  #! self.w as in-place",
    "function that splits": "for p in torch.unbind(self.w):\n    p.copy_(tensor)  #! self.w as in-place",
    "transposed": "self.w.T.view(-1)[0].unsqueeze(0).copy_(tensor)  #! self.w as in-place",
    "loop over parameters": "for key, p in self.named_parameters():\n    p.zero_()  #! self.* as in-place",
    "loop over pairs": "for p, t in zip(self.parameters(), [tensor]):\n    p.copy_(t)  #! self.* as in-place",
    "loop over modules": "for i, l in enumerate(self.layers): l.sinks.zero_()  #! self.layers[*].sinks as in-place",
    "modules put together": (
        "held = nn.ModuleDict({'a': self.layer})\n"
        "dict(held.named_parameters())[name].copy_(tensor)  #! name as in-place"
    ),
    "range of modules": "self.layers[1:][0].sinks.copy_(tensor)  #! self.layers[*].sinks as in-place",
    "comprehension": "[p.zero_() for p in self.layer.parameters() if p.ndim]  #! self.layer.* as in-place",
    "own table": "own = {k: v for k, v in params.items() if k}\nown[name].copy_(tensor)  #! name as in-place",
    "table of attributes": (
        "own = {'a': self.w, 'b': self.mask}\nown[name].copy_(tensor)  #! self.mask as in-place; self.w as in-place"
    ),
    "merged tables": "every = {**params, **dict(self.named_buffers())}\nevery[name].copy_(tensor)  #! name as in-place",
    "list that grows": "held = []\nheld.append(self.w)\nheld[-1].copy_(tensor)  #! self.w as in-place",
    "table that grows": "held = {}\nheld[name] = self.w\nheld['a'].copy_(tensor)  #! self.w as in-place",
    "getattr": "getattr(self, 'w').copy_(tensor)  #! self.w as in-place",
    "getattr by a variable": "getattr(self.layer, name).data.copy_(tensor)  #! name as in-place",
    "get_parameter": "self.get_parameter(name).copy_(tensor)  #! name as in-place",
    "get_submodule": "self.get_submodule(name).weight.copy_(tensor)  #! name.weight as in-place",
    "unknown with .data": "found(name).data.copy_(tensor)  #! found(name) as in-place",
    "with": "with torch.no_grad():\n    self.w.copy_(tensor)  #! self.w as in-place",
    "try": "try:\n    p = params[name]\nexcept KeyError:\n    continue\np.copy_(tensor)  #! name as in-place",
    "before a break": "while True:\n    p = self.w\n    break\np.copy_(tensor)  #! self.w as in-place",
    "from the round before": "if name:\n    last.copy_(tensor)  #! self.w as in-place\nlast = self.w",
    "match": "match name:\n    case 'a':\n        self.w.zero_()  #! self.w as in-place",
}

LABELS = {
    "in": "if 'sinks' in name:\n    params[name].copy_(tensor)  #! sinks as in-place",
    "looked up before": "p = params[name]\nif 'sinks' in name:\n    p.copy_(tensor)  #! sinks as in-place",
    "ends with either": "if name.endswith(('.a', '.b')):\n    params[name].zero_()  #! .a|.b as in-place",
    "or": "if 'a' in name or name.endswith('b'):\n    params[name].zero_()  #! a|b as in-place",
    "and": "if 'a' in name and tensor.ndim and 'b' in name:\n    params[name].zero_()  #! a & b as in-place",
    "any of": "if any(s in name for s in ['a', 'b']):\n    params[name].zero_()  #! a|b as in-place",
    "equal": "if name == 'a':\n    params[name].zero_()  #! a as in-place",
    "innermost": "if 'a' in name:\n    if 'b' in name:\n        params[name].zero_()  #! b as in-place",
    "not": "if 'a' not in name:\n    params[name].zero_()  #! name as in-place",
    "else of not": "if 'a' not in name:\n    pass\nelse:\n    params[name].zero_()  #! a as in-place",
    "not ends with": "if not name.endswith('.a'):\n    continue\nparams[name].zero_()  #! .a as in-place",
    "about the name first": "if 'a' in name:\n    if 'x' in kind:\n        params[name].zero_()  #! a as in-place",
    "after leaving": "if 'a' not in name:\n    continue\nparams[name].zero_()  #! a as in-place",
    "about something else": "if self.kind == 'fp8':\n    params[name].zero_()  #! name as in-place",
    "another variable of the name": "full = 'x.' + name\nif 'a' in name:\n    params[full].zero_()  #! a as in-place",
    "literal": "if 'a' in name:\n    params['b.c'].zero_()  #! b.c as in-place",
    "f-string": "params[f'{name}.bias'].zero_()  #! {name}.bias as in-place",
    "renamed": (
        "for part, whole in [('.q', '.qkv'), ('.k', '.qkv')]:\n    full = name.replace(part, whole)\n"
        "    params[full].zero_()  #! .qkv as in-place"
    ),
    "renamed, then not found": (
        "for part, whole in [('.q', '.qkv')]:\n    if part not in name:\n        continue\n"
        "    name = name.replace(part, whole)\n    break\n"
        "else:\n    if 'sink' in name:\n        params[name].zero_()  #! sink as in-place"
    ),
}

HARMLESS = {
    "current loader": "params[name].weight_loader(params[name], tensor)",
    "loader or default": "load = getattr(self.w, 'weight_loader', default_weight_loader)\nload(self.w, tensor)",
    "copy": "self.w.clone().copy_(tensor)\nself.w.to(torch.float32).zero_()",
    "fresh": "t = torch.empty_like(self.w)\nt[:2] = tensor\nt.copy_(tensor)",
    "stack of parameters": "t = torch.cat([self.w, self.w])\nt.zero_()",
    "sum": "t = self.w + 1\nt *= 2",
    "assigned anew": "p = self.w\np = torch.zeros(4)\np.copy_(tensor)",
    "tensor by annotation": "self.derived.copy_(tensor)\nself.derived = torch.cat([self.w])",
    "other buffer": "self.mask = tensor",
    "plain tensor": "self.scratch.copy_(tensor)\nself.scratch = torch.cat([self.w])",
    "table": "self.seen[name] = tensor\nparams[name] = tensor\nparams.update(self.seen)",
    "set": "loaded = set()\nloaded.add(name)\nloaded |= {name}",
    "attribute of a parameter": "self.w.output_dim = 0\nself.w.requires_grad_(False)",
    "attribute of a module": "self.layer.kind = 'b'\nself.layer.other = Layer()",
    "loader attached": "self.w.weight_loader = lambda p, t: p.data.copy_(t)",
    "module put elsewhere": "self.layer = self.layers[0]",
    "variable that is not set yet": "later.copy_(self.w)",
}


def _exact(code: str) -> None:
    """`code` in the loop of load_weights gives the rows that it is marked with, and no others."""
    files = body(code)
    assert rows(files) == marked(files, "Model.load_weights")


@pytest.mark.parametrize("code", [*WRITES.values()], ids=[*WRITES])
def test_each_kind_of_write_is_listed(code):
    _exact(code)


@pytest.mark.parametrize("code", [*ALIASES.values()], ids=[*ALIASES])
def test_a_parameter_is_followed_through_every_name_it_gets(code):
    _exact(code)


@pytest.mark.parametrize("code", [*LABELS.values()], ids=[*LABELS])
def test_a_parameter_that_is_looked_up_is_named_by_what_the_conditions_say_of_it(code):
    _exact(code)


@pytest.mark.parametrize("code", [*HARMLESS.values()], ids=[*HARMLESS])
def test_what_goes_through_a_loader_or_writes_no_parameter_is_not_listed(code):
    assert rows(body(code)) == []


VIEWS = (".data", "[0]", "[:, 1:]", ".view(-1)", ".narrow(0, 0, 1)", ".T", ".unbind()[0]", ".detach()", ".squeeze()")
COPIES = (".clone()", ".float()", " + 1", ".to(torch.float32)", ".sum()")
SOURCES = ("params[name]", "self.w", "self.layers[0].sinks", "getattr(self, 'w')", "next(self.parameters())")
STORES = ("{}.copy_(tensor)", "{}[:1] = tensor", "{} += tensor", "torch.add(tensor, 1, out={})", "{}.data = tensor")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SOURCES), st.lists(st.sampled_from(VIEWS), max_size=6), st.sampled_from(STORES))
def test_any_view_of_a_view_is_the_parameter(source, views, store):
    code = [f"v0 = {source}", *(f"v{n + 1} = v{n}{view}" for n, view in enumerate(views))]
    code.append(store.format(f"v{len(views)}"))
    assert [row[1] for row in rows(body("\n".join(code)))] == [HEAD.count("\n") + len(code)]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(SOURCES),
    st.lists(st.sampled_from(VIEWS), max_size=3),
    st.sampled_from(COPIES),
    st.lists(st.sampled_from(VIEWS + COPIES), max_size=3),
    st.sampled_from(STORES),
)
def test_a_view_of_a_copy_is_not(source, before, copy, after, store):
    steps = [*before, copy, *after]
    code = [f"v0 = {source}", *(f"v{n + 1} = v{n}{step}" for n, step in enumerate(steps))]
    code.append(store.format(f"v{len(steps)}"))
    assert rows(body("\n".join(code))) == []
