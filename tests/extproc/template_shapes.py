"""Chat templates with the shapes of well-known models, written for these tests.

Each builds the text that models of its family expect: their markers, their place for tools, their
rules for the order of turns. The formats are facts; the wording is ours.
"""

CHATML = """
{%- for turn in messages %}
    {{- '<|im_start|>' ~ turn.role ~ '\\n' ~ turn.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# headers around roles, the date in the system turn, tools printed with an indent, one call per turn
LLAMA3 = """
{{- bos_token }}
{%- set today = date_string if date_string is defined else strftime_now('%d %b %Y') %}
{%- if messages[0].role == 'system' %}
    {%- set opening = messages[0].content | trim %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set opening = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- macro turn_header(role) %}
    {{- '<|start_header_id|>' ~ role ~ '<|end_header_id|>\\n\\n' }}
{%- endmacro %}
{{- turn_header('system') ~ 'Today: ' ~ today ~ '\\n\\n' }}
{%- if tools is not none %}
    {%- for tool in tools %}{{- tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
{%- endif %}
{{- opening ~ '<|eot_id|>' }}
{%- for turn in turns %}
    {%- if turn.tool_calls is defined %}
        {%- if turn.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif %}
        {%- set call = turn.tool_calls[0].function %}
        {{- turn_header('assistant') ~ '{"name": "' ~ call.name ~ '", "parameters": ' }}
        {{- call.arguments | tojson ~ '}<|eot_id|>' }}
    {%- elif turn.role == 'tool' %}
        {{- turn_header('ipython') ~ (turn.content | tojson) ~ '<|eot_id|>' }}
    {%- else %}
        {{- turn_header(turn.role) ~ (turn.content | trim) ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn_header('assistant') }}{% endif %}"""

# user and assistant must alternate, or the template refuses; call ids have nine characters
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set opening, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set opening, turns = none, messages %}
{%- endif %}
{%- set state = namespace(count=0) %}
{%- for turn in turns if turn.role in ('user', 'assistant') and turn.tool_calls is not defined %}
    {%- if (turn.role == 'user') != (state.count % 2 == 0) %}
        {{- raise_exception('user and assistant must take turns') }}
    {%- endif %}
    {%- set state.count = state.count + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for turn in turns %}
    {%- if turn.role == 'user' %}
        {%- if loop.last and tools %}
            {{- '[AVAILABLE_TOOLS] ' ~ (tools | map(attribute='function') | list | tojson) }}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ (opening ~ '\\n\\n' if loop.last and opening else '') ~ turn.content }}
        {{- '[/INST]' }}
    {%- elif turn.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in turn.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('ids have nine characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- ', ' if not loop.last else ']' ~ eos_token }}
        {%- endfor %}
    {%- elif turn.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ turn.content ~ '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' ~ (turn.content | trim) ~ eos_token }}
    {%- endif %}
{%- endfor %}"""

# tools in the system turn, tool results in a user turn, adjacent ones under one header
QWEN_TOOLS = """
{%- set opening = messages[0].content if messages[0].role == 'system' else 'Be helpful.' %}
{{- '<|im_start|>system\\n' ~ opening }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for turn in messages %}
    {%- if turn.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' ~ turn.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif not (loop.first and turn.role == 'system') %}
        {{- '<|im_start|>' ~ turn.role }}
        {%- if turn.content %}{{ '\\n' ~ turn.content }}{% endif %}
        {%- for call in turn.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if thinking_off is defined and thinking_off %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# all system turns come first; the thinking is cut from what the model said
DEEPSEEK = """
{%- set state = namespace(opening='', is_first=true) %}
{%- for turn in messages if turn.role == 'system' %}
    {%- set state.opening = state.opening ~ ('' if state.is_first else '\\n\\n') ~ turn.content %}
    {%- set state.is_first = false %}
{%- endfor %}
{{- bos_token ~ state.opening }}
{%- for turn in messages %}
    {%- if turn.role == 'user' %}
        {{- '<｜User｜>' ~ turn.content }}
    {%- elif turn.role == 'assistant' %}
        {%- set said = turn.content %}
        {%- if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' ~ said ~ '<｜end▁of▁sentence｜>' }}
    {%- elif turn.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' ~ turn.content ~ '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

# contents in parts, the assistant is called model, the system turn goes into the first user turn
GEMMA = """
{{- bos_token }}
{%- set state = namespace(opening='', start=0) %}
{%- if messages[0].role == 'system' %}
    {%- set state.opening = messages[0].content[0].text ~ '\\n\\n' %}
    {%- set state.start = 1 %}
{%- endif %}
{%- for message in messages[state.start:] %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
    {{- state.opening if loop.first else '' }}
    {%- for part in message.content %}
        {%- if part.type == 'image' %}{{ '<start_of_image>' }}
        {%- elif part.type == 'text' %}{{ part.text | trim }}{% endif %}
    {%- endfor %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

# what the model wrote is marked for training; break and continue in loops
GENERATION = """
{%- for turn in messages %}
    {%- if turn.role == 'note' %}{% continue %}{% endif %}
    {%- if loop.index > 4 %}{% break %}{% endif %}
    {{- '[' ~ turn.role ~ ']' }}
    {%- if turn.role == 'assistant' %}
        {%- generation %}{{ turn.content ~ eos_token }}{% endgeneration %}
    {%- else %}{{ turn.content }}{% endif %}
{%- endfor %}"""

SHAPES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen_tools": QWEN_TOOLS,
    "deepseek": DEEPSEEK,
    "gemma": GEMMA,
    "generation": GENERATION,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
