"""Resolves the `$ref`s of a JSON schema."""

from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

Schema = dict[str, Any]

# Keywords by the kind of their value: a schema, a list of schemas, or an object of
# schemas by name.
SCHEMA_KEYWORDS = frozenset({"additionalItems", "additionalProperties", "items"})
SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMA_MAP_KEYWORDS = frozenset({"patternProperties", "properties"})
DEFINITION_KEYWORDS = ("$defs", "definitions")


class Resource(NamedTuple):
    """A schema that has its own identifier, or the root schema of a document.

    References such as `#/...` within a resource are relative to its `root`.

    Attributes:
        base: the identifier, a URI.
        root: the schema.
    """

    base: str
    root: Any


def children(schema: Schema) -> list[tuple[str, Any]]:
    """Return each value directly within `schema` that must be a schema, with its path.

    Paths are relative to `schema`. Definitions are not included.
    """
    parts: list[tuple[str, Any]] = []
    for keyword, value in schema.items():
        if keyword in SCHEMA_LIST_KEYWORDS or (
            keyword == "items" and isinstance(value, list)
        ):
            if isinstance(value, list):
                parts += [(f"{keyword}[{i}]", each) for i, each in enumerate(value)]
        elif keyword in SCHEMA_KEYWORDS:
            parts.append((keyword, value))
        elif keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            parts += [(f"{keyword}.{name}", each) for name, each in value.items()]
    return parts


class References:
    """Resolves the references of one document.

    Args:
        document: the root schema.
        id_keyword: the keyword for identifiers: `$id`, or `id` in draft 4.
    """

    def __init__(self, document: Schema, id_keyword: str) -> None:
        self._id_keyword = id_keyword
        self._resources: dict[str, Resource] = {}  # by identifier
        # The schemas with an anchor, by the id() of their resource's root and the name
        # of the anchor.
        self._anchored_schemas: dict[tuple[int, str], Any] = {}
        base = document.get(id_keyword)
        self.root = Resource(base if isinstance(base, str) else "", document)
        self._collect(document)

    def _collect(self, document: Schema) -> None:
        """Store the schemas that have an identifier or an anchor."""
        waiting: list[tuple[Any, Resource]] = [(document, self.root)]
        self._resources[urldefrag(self.root.base)[0]] = self.root
        while waiting:
            schema, resource = waiting.pop()
            if not isinstance(schema, dict):
                continue
            resource = self.resource_of(schema, resource)
            self._resources.setdefault(resource.base, resource)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := schema.get(keyword), str):
                    self._anchored_schemas[id(resource.root), name] = schema
            definitions = [schema.get(keyword) for keyword in DEFINITION_KEYWORDS]
            for named in definitions:
                if isinstance(named, dict):
                    waiting += [(each, resource) for each in named.values()]
            waiting += [(each, resource) for _, each in children(schema)]

    def resource_of(self, schema: Schema, parent: Resource) -> Resource:
        """Return the resource to which a schema within `parent` belongs.

        A schema that has an identifier is itself a resource.
        """
        name = schema.get(self._id_keyword)
        if schema is parent.root or not isinstance(name, str) or name.startswith("#"):
            return parent
        return Resource(urldefrag(urljoin(parent.base, name))[0], schema)

    def resolve(
        self, reference: str, resource: Resource
    ) -> tuple[Any, Resource] | None:
        """Return the schema to which a `$ref` in `resource` refers, and its resource.

        Returns None if the document has no such schema.
        """
        uri, fragment = urldefrag(reference)
        if uri:
            absolute = urldefrag(urljoin(resource.base, uri))[0]
            identified = self._resources.get(absolute)
            if identified is None:
                return None
            resource = identified
        fragment = unquote(fragment)
        if not fragment:
            return resource.root, resource
        if not fragment.startswith("/"):
            anchored = self._anchored_schemas.get((id(resource.root), fragment))
            return None if anchored is None else (anchored, resource)
        return _at_pointer(fragment, resource)


def _at_pointer(pointer: str, resource: Resource) -> tuple[Any, Resource] | None:
    """Return the schema at a JSON pointer such as `/$defs/a`, and its resource.

    Returns None if the resource has nothing at the pointer.
    """
    value = resource.root
    for part in pointer[1:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value, resource
