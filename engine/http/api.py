"""What all calls of one server's HTTP application share."""

from engine.http.hooks import ServerHooks
from engine.http.text_encoder import TextEncoder
from engine.process.client import Engine
from engine.text.grammar_check import GrammarChecker
from engine.text.tokenizer import Tokenizer
from protocol.errors import NoServerAvailable
from protocol.messages import EngineReady
from protocol.metrics import Metrics
from protocol.openai.sampling import GenerationConfig
from protocol.settings.settings import EngineSettings


class Api:
    """Everything a call needs, made once per application.

    Args:
        fingerprint: the `system_fingerprint` of answers.
        config: what requests get where they do not say.
    """

    def __init__(
        self,
        client: Engine,
        tokenizer: Tokenizer,
        settings: EngineSettings,
        hooks: ServerHooks,
        fingerprint: str | None = None,
        config: GenerationConfig | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.hooks = hooks
        self.fingerprint = fingerprint
        self.generation_config = config or GenerationConfig()
        self.metrics = Metrics("server")
        self.texts = TextEncoder(tokenizer)
        self.grammars = GrammarChecker(tokenizer, settings.grammar_timeout_s)

    @property
    def model_names(self) -> list[str]:
        return [self.settings.served_model_name or self.settings.model]

    def require_ready(self) -> EngineReady:
        """What the engine said of itself. Raises ServiceError before it did, or when it died."""
        if self.client.ready is None and self.client.healthy:
            raise NoServerAvailable("The engine is still starting; try again soon.")
        self.client.check_alive()
        assert self.client.ready is not None
        return self.client.ready
