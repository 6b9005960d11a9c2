"""Chat templates in the shapes of those of model families: what each shows of tools, and how.

They are short, and ours: the words are not those of the families, the places and the marks are.
"""

_SYSTEM_FIRST = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set system = 'Be helpful.' %}{% set rest = messages %}
{%- endif %}"""

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each call, write <tool_call>
{"name": <name>, "arguments": <arguments>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
{%- if (loop.first and message.content) or not loop.first %}{{ '\\n' }}{% endif %}
{%- if call.function %}{% set call = call.function %}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments | tojson }}
{%- endif %}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN_3_5 = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
Write calls so: <tool_call>
<function=example_name>
<parameter=example>
value
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}
{%- endfor %}{{ '</function>\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SMOLLM3 = """\
<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n' }}{% endif %}
{%- if xml_tools or python_tools %}### Tools
{% if xml_tools %}<tools>
{% for tool in xml_tools[:] %}{{ (tool | string) + '\\n' }}{% endfor %}</tools>
Write a JSON object within <tool_call></tool_call>.{% endif %}
{% endif %}<|im_end|>
{% for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{%- if message.role in ('user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

DEEPSEEK_R1 = """\
{%- set ns = namespace(is_first=false, system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for tool in m['tool_calls'] %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}
{{- tool['type'] + '<｜tool▁sep｜>' }}
{{- tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments'] + '\\n```' }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'assistant' %}
{%- set content = m['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'tool' %}
{{- '<｜tool▁outputs▁begin｜>' + m['content'] + '<｜tool▁outputs▁end｜>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

GRANITE_3_0 = """\
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>\\n' }}
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
{{- '<|end_of_text|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m['role'] in ('system', 'user', 'assistant') %}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}
{%- elif m['role'] == 'assistant_tool_call' %}
{{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' }}
{{- m['content'] + '<|end_of_text|>\\n' }}
{%- elif m['role'] == 'tool_response' %}
{{- '<|start_of_role|>tool_response<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""

GRANITE_3_3 = (
    _SYSTEM_FIRST
    + """\
{%- if tools %}{% set system = system + ' Respond only with <|tool_call|> and a JSON list.' %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\\n' }}
{%- if tools %}{{ '<|start_of_role|>available_tools<|end_of_role|>' }}
{{- (tools | tojson(indent=4)) + '<|end_of_text|>\\n' }}{% endif %}
{%- for m in rest %}
{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' + m['content'] + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"""
)

_GEMMA = """\
{{- bos_token }}SYSTEM
{%- for message in rest %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{{- (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA_2 = _GEMMA.replace(
    "SYSTEM",
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% set rest = messages %}{% set first = '' %}",
)
GEMMA_3 = _GEMMA.replace(
    "SYSTEM",
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\\n\\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% set first = '' %}"
    "{% endif %}",
)

GEMMA_4 = """\
{{- bos_token }}
{%- macro written(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{% raw %}{{% endraw %}
{%- for k, v in value | items %}{{ k + ':' }}{{ written(v) }}{% if not loop.last %},{% endif %}
{%- endfor %}{% raw %}}{% endraw %}
{%- elif value is sequence %}[
{%- for v in value %}{{ written(v) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- elif value is none %}null{% elif value is boolean %}{{ 'true' if value else 'false' }}
{%- else %}{{ value }}{% endif %}
{%- endmacro %}
{%- if tools %}{{ '<|turn>system\\n' }}{% for tool in tools %}
{{- '<|tool>declaration:' + tool.function.name }}{{ written(tool.function) }}<tool|>{% endfor %}
{{- '<turn|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|turn>user\\n<|tool_response>' + m.content + '<tool_response|><turn|>\\n' }}
{%- else %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls %}
{{- '<|tool_call>call:' + call.function.name }}{{ written(call.function.arguments) }}<tool_call|>
{%- endfor %}{{ '<turn|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

_LLAMA = (
    "{{- bos_token }}"
    + _SYSTEM_FIRST
    + """\
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}TOOLS
{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for message in rest %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}CALLS{{ '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- (message.content | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
)

LLAMA_3_1 = _LLAMA.replace(
    "TOOLS", """{{ 'Respond with {"name": name, "parameters": dictionary}.\\n\\n' }}"""
).replace(
    "CALLS",
    """{% if message.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}""",
)
LLAMA_PYTHONIC = _LLAMA.replace(
    "TOOLS", "{{ 'Respond with a python list: [func_name1(name=value), func_name2()]\\n\\n' }}"
).replace(
    "CALLS",
    """[{% for call in message.tool_calls %}{{ call.function.name + '(' }}
{%- for name, value in call.function.arguments | items %}{{ name + '=' + (value | tojson) }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}
{%- endfor %}]""",
)
FUNCTIONARY = _LLAMA.replace(
    "TOOLS", "{{ '<function=example_name>{parameters}</function>\\n\\n' }}"
).replace(
    "CALLS",
    """{{ message.content or '' }}{% for call in message.tool_calls %}
{%- if call.function.name == 'python' %}{{ '<|python_tag|>' + call.function.arguments }}{% else %}
{{- '<function=' + call.function.name + '>' + call.function.arguments + '</function>' }}{% endif %}
{%- endfor %}""",
)

LLAMA_3 = """\
{{- bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + (m['content'] | trim) }}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL = (
    _SYSTEM_FIRST
    + """\
{{- bos_token }}
{%- for m in rest %}
{%- if m.role == 'user' %}
{%- if tools and m == (rest | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + (system + '\\n\\n' if loop.first else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}CALLS{{ eos_token }}
{%- elif m.role == 'assistant' %}{{ m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}
{%- endfor %}"""
)
MISTRAL_NEMO = _MISTRAL.replace(
    "CALLS",
    """{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}, {% endif %}{% endfor %}]""",
)
MISTRAL_SMALL = _MISTRAL.replace(
    "CALLS",
    """{{ m.content or '' }}{% for call in m.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
{%- endfor %}""",
)

MISTRAL_7B = """\
{{- bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

PHI_3 = """\
{%- for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI_4_MINI = """\
{%- for m in messages %}
{%- if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}
{{- '<|' + m['role'] + '|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|><|end|>' }}
{%- else %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

LFM2 = """\
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>system\\nList of tools: <|tool_list_start|>[' }}
{%- for tool in tools %}{{ tool | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}
{{- ']<|tool_list_end|><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}
{%- if m['role'] == 'tool' %}
{{- '<|tool_response_start|>' + m['content'] + '<|tool_response_end|>' }}
{%- else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LFM2_5 = LFM2.replace(
    "{%- else %}{{ m['content'] }}{% endif %}",
    """{%- else %}{{ m['content'] }}{% if m.tool_calls %}{{ '<|tool_call_start|>[' }}
{%- for call in m.tool_calls %}{{ call.function.name + '(' }}
{%- for k, v in call.function.arguments | items %}{{ k + '=' + (v | tojson) }}
{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}
{{- ']<|tool_call_end|>' }}{% endif %}{% endif %}""",
)

_CALLS_IN_LIST = """\
{%- if m.tool_calls %}{{ '<tool_calls>[' }}{% for call in m.tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}' }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ']</tool_calls>' }}{% endif %}"""

HUNYUAN_A13B = (
    """\
{%- if tools %}{{ bos_token + (tools | tojson) }}<tool_calls>[...]</tool_calls><|extra_4|>
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<tool_response>' + m.content + '</tool_response><|extra_0|>' }}
{%- elif m.role == 'user' %}{{ m.content + '<|extra_0|>' }}
{%- elif m.role == 'system' %}{{ m.content + '<|extra_4|>' }}
{%- else %}{{ m.content or '' }}{% if tools %}"""
    + _CALLS_IN_LIST
    + """{% endif %}{{ '<|eos|>' }}{% endif %}
{%- endfor %}"""
)

OLMO_3_THINK = """\
{%- for m in messages %}
{%- if m['role'] == 'system' %}{{ '<|im_start|>system\\n' + m['content'] }}
{%- if m.get('functions', none) is not none %}
{{- ' <functions>' + m['functions'] + '</functions>' }}
{%- else %}{{ ' You do not currently have access to any functions. <functions></functions>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- elif m['role'] == 'user' %}{{ '<|im_start|>user\\n' + m['content'] + '<|im_end|>\\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' + m['content'] }}
{%- if m.get('function_calls', none) is not none %}
{{- '<function_calls>' + m['function_calls'] + '</function_calls>' }}
{%- endif %}{{ '<|im_end|>\\n' }}
{%- elif m['role'] == 'environment' %}
{{- '<|im_start|>environment\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}"""

MUSE_GLIMMER = """\
{{- bos_token }}
{%- if tools %}{{ '<|start|>system<|message|>Write <atem:function_calls>\\n' }}
{%- for tool in tools %}{% set f = tool.function %}
{{- '{"name": ' + (f.name | tojson) + ', "description": ' + (f.description | tojson) }}
{{- ', "parameters": ' + (f.parameters | tojson) + '}\\n' }}{% endfor %}{{ '<|eot|>' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start|>tool<|message|><tool_output>\\n' + m.content + '\\n</tool_output><|eot|>' }}
{%- elif m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|eot|>' }}
{%- else %}
{%- if m.reasoning_content %}
{{- '<|start|>assistant to=self<|message|>' + m.reasoning_content + '<|eom|>' }}{% endif %}
{%- if m.tool_calls %}{% for call in m.tool_calls %}{% set f = call.function %}
{%- if f.arguments is not mapping %}{{ raise_exception('arguments must be a mapping') }}{% endif %}
{{- '<|start|>assistant to=' + f.name + '<|message|><atem:function_calls>\\n' }}
{{- '<atem:invoke name="' + f.name + '">\\n' }}
{%- for k, v in f.arguments | items %}{{ '<atem:parameter name="' + k + '">' }}
{%- if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}{{ '</atem:parameter>\\n' }}
{%- endfor %}
{{- '</atem:invoke>\\n</atem:function_calls>' + ('<|eot|>' if loop.last else '<|eom|>') }}
{%- endfor %}
{%- else %}{{ '<|start|>assistant to=user<|message|>' + m.content + '<|eot|>' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

GLM_4_5 = """\
[gMASK]<sop>
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{name}
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}{{ '\\n<think></think>' }}{% endif %}
{{- '\\n' + (m.content or '') }}
{%- for call in m.tool_calls %}{{ '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for k, v in call.function.arguments.items() %}
{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + (v if v is string else v | tojson) }}
{{- '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n<think></think>' }}{% endif %}"""

KIMI_K2 = """\
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_user|>user<|im_middle|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|im_assistant|>assistant<|im_middle|>' + (m.content or '') }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}
{%- else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}
{{- '<|tool_calls_section_end|>' }}{% endif %}
{%- elif m.role == 'tool' %}
{{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
{%- else %}{{ '<|im_system|>system<|im_middle|>' + m.content }}{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"""

DEEPSEEK_3 = """\
{%- set ns = namespace(is_asked=false, system='') %}
{%- for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = m['content'] %}{% endif %}
{%- endfor %}{{ bos_token + ns.system }}
{%- if tools %}{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{% set ns.is_asked = true %}
{%- elif m['role'] == 'assistant' %}
{%- if ns.is_asked %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set ns.is_asked = false %}
{{- m['content'] or '' }}
{%- if m['tool_calls'] is defined %}<｜tool▁calls▁begin｜>{% for call in m['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] }}
{{- '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{% endif %}<｜end▁of▁sentence｜>
{%- elif m['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.is_asked %}{{ '<｜Assistant｜></think>' }}{% endif %}"""

COHERE_7B = """\
{{- bos_token }}{% set ns = namespace(number=0) %}
{%- for m in messages %}{% if m.role == 'system' %}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{%- endfor %}
{%- if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write <|START_ACTION|> and a list.
{% for tool in tools %}{"name": "{{ tool['function']['name'] }}", "parameters":
{{- tool['function']['parameters'] | tojson }}}{% endfor %}<|END_OF_TURN_TOKEN|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}
{%- elif m.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
{%- if m.tool_calls %}<|START_THINKING|>{{ m.tool_plan }}<|END_THINKING|><|START_ACTION|>[
{% for call in m.tool_calls %}    {"tool_call_id": "{{ ns.number }}", "tool_name": "
{{- call['function']['name'] }}", "parameters": {{ call['function']['arguments'] | tojson }}}
{%- if not loop.last %},{% endif %}
{% set ns.number = ns.number + 1 %}{% endfor %}]<|END_ACTION|>
{%- else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>
{%- elif m.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[
    {"tool_call_id": "{{ m.tool_call_id }}", "results": {"0": {{ m.content | tojson }}}}
]<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""

TEMPLATES = {
    "Qwen 2.5, Qwen 3": QWEN,
    "Qwen 3.5": QWEN_3_5,
    "SmolLM2, Qwen 1.5": CHATML,
    "SmolLM3": SMOLLM3,
    "DeepSeek-R1-Distill": DEEPSEEK_R1,
    "Granite 3.0": GRANITE_3_0,
    "Granite 3.3": GRANITE_3_3,
    "Gemma 2": GEMMA_2,
    "Gemma 3": GEMMA_3,
    "Gemma 4": GEMMA_4,
    "Llama 3": LLAMA_3,
    "Llama 3.1": LLAMA_3_1,
    "Llama 3.2 pythonic": LLAMA_PYTHONIC,
    "functionary": FUNCTIONARY,
    "Mistral 7B": MISTRAL_7B,
    "Mistral Nemo": MISTRAL_NEMO,
    "Mistral Small": MISTRAL_SMALL,
    "Phi-3, Phi-4": PHI_3,
    "Phi-4-mini": PHI_4_MINI,
    "LFM2": LFM2,
    "LFM2.5": LFM2_5,
    "HunYuan A13B": HUNYUAN_A13B,
    "Olmo 3 Think": OLMO_3_THINK,
    "Muse Glimmer": MUSE_GLIMMER,
    "GLM 4.5, Laguna": GLM_4_5,
    "Kimi": KIMI_K2,
    "DeepSeek V3": DEEPSEEK_3,
    "Command R7B": COHERE_7B,
}
