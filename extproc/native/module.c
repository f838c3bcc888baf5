/* The Python module extproc._core: checks and converts, then calls the session and the decoder.
 *
 * extproc/http2/session.py and extproc/serving/proxy_message.py describe the interfaces; their plain
 * implementations are in Python. What it has for the routing is in columns.c and claims.c, for the
 * tokens in turn_table.c. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "claims.h"
#include "columns.h"
#include "message.h"
#include "numbers.h"
#include "session.h"
#include "turn_table.h"

/* Returns a constant with a reference taken at run time: kvstate/native/module.c says why. */
static PyObject *constant(PyObject *object) {
    Py_IncRef(object);
    return object;
}

static bool arguments_are(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "wants %zd arguments, got %zd", wanted, given);
    return false;
}

static PyObject *bytes_of(Text text) {
    return PyBytes_FromStringAndSize((const char *)text.bytes, (Py_ssize_t)text.length);
}

/* --- the budget --- */

typedef struct {
    PyObject_HEAD
    Amount amount;
} CoreBudget;

static PyTypeObject *budget_type;

static PyObject *budget_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    long long max_bytes;
    if (!PyArg_ParseTuple(arguments, "L", &max_bytes)) return NULL;
    CoreBudget *self = (CoreBudget *)PyType_GenericAlloc(type, 0);
    if (self) self->amount = (Amount){max_bytes, 0};
    return (PyObject *)self;
}

static void plain_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyObject *budget_take(CoreBudget *self, PyObject *size) {
    long long bytes = PyLong_AsLongLong(size);
    if (bytes == -1 && PyErr_Occurred()) return NULL;
    return constant(amount_take(&self->amount, bytes) ? Py_True : Py_False);
}

static PyObject *budget_give_back(CoreBudget *self, PyObject *size) {
    long long bytes = PyLong_AsLongLong(size);
    if (bytes == -1 && PyErr_Occurred()) return NULL;
    self->amount.used_bytes -= bytes;
    return constant(Py_None);
}

static PyObject *budget_max_bytes(CoreBudget *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->amount.max_bytes);
}

static PyObject *budget_used_bytes(CoreBudget *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->amount.used_bytes);
}

static PyMethodDef budget_methods[] = {
    {"take", (PyCFunction)budget_take, METH_O, NULL},
    {"give_back", (PyCFunction)budget_give_back, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef budget_values[] = {
    {"max_bytes", (getter)budget_max_bytes, NULL, NULL, NULL},
    {"used_bytes", (getter)budget_used_bytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot budget_slots[] = {
    {Py_tp_doc, "The compiled budget; extproc.http2.limits.Budget describes it."},
    {Py_tp_new, budget_new},
    {Py_tp_dealloc, plain_dealloc},
    {Py_tp_methods, budget_methods},
    {Py_tp_getset, budget_values},
    {0, NULL},
};

static PyType_Spec budget_spec = {"extproc._core.CompiledBudget", sizeof(CoreBudget), 0,
                                  Py_TPFLAGS_DEFAULT, budget_slots};

/* --- the session --- */

typedef struct {
    PyObject_HEAD
    Session session;
    PyObject *budget;
} CoreSession;

/* values: those of extproc.http2.limits.Limits, in its order. */
static bool limits_of(PyObject *values, Limits *limits) {
    int64_t *const fields[] = {
        &limits->max_streams,           &limits->max_header_block_bytes,
        &limits->max_header_list_bytes, &limits->max_continuations,
        &limits->stream_window_bytes,   &limits->connection_window_bytes,
        &limits->pings_a_tick,          &limits->settings_a_tick,
        &limits->idle_frames_a_tick,    &limits->idle_frames_a_stream,
        &limits->rapid_resets_a_tick,   &limits->faults_a_tick,
        &limits->preface_ticks,         &limits->stall_ticks,
    };
    Py_ssize_t count = (Py_ssize_t)(sizeof fields / sizeof *fields);
    if (!arguments_are(PyTuple_Size(values), count)) return false;
    for (Py_ssize_t n = 0; n < count; n++)
        *fields[n] = PyLong_AsLongLong(PyTuple_GetItem(values, n));
    return !PyErr_Occurred();
}

static PyObject *session_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    PyObject *values, *budget;
    long long max_message_bytes;
    Limits limits;
    if (!PyArg_ParseTuple(arguments, "O!LO!", &PyTuple_Type, &values, &max_message_bytes,
                          budget_type, &budget) ||
        !limits_of(values, &limits))
        return NULL;
    CoreSession *self = (CoreSession *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    session_init(&self->session, &limits, max_message_bytes, &((CoreBudget *)budget)->amount);
    Py_INCREF(budget);
    self->budget = budget;
    return (PyObject *)self;
}

static void session_dealloc(CoreSession *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->budget) {
        session_close(&self->session);
        session_free(&self->session);
        Py_DECREF(self->budget);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Raises MemoryError if the session had no memory at some time: it must not be used any more. */
static bool is_sound(const CoreSession *self) {
    const Connection *connection = &self->session.connection;
    if (!connection->is_broken && !connection->out.is_broken) return true;
    PyErr_NoMemory();
    return false;
}

static bool stream_of(PyObject *number, uint32_t *stream_id) {
    unsigned long value = PyLong_AsUnsignedLong(number);
    if (value == (unsigned long)-1 && PyErr_Occurred()) return false;
    *stream_id = value > UINT32_MAX ? 0 : (uint32_t)value;
    return true;
}

/* What comes with an event: of a new call its path and trace, of a failed one status and text. */
static PyObject *content_of(const CallEvent *event) {
    switch (event->kind) {
    case CALL_OPENED:
        return Py_BuildValue("(NN)", bytes_of(event->bytes), bytes_of(event->trace));
    case CALL_PART:
    case CALL_MESSAGE:
        return bytes_of(event->bytes);
    case CALL_FAILED: {
        char text[100];
        int length = PyOS_snprintf(text, sizeof text, event->text, event->length);
        return Py_BuildValue("(is#)", event->status, text, (Py_ssize_t)length);
    }
    default:
        return constant(Py_None);
    }
}

static PyObject *event_of(const CallEvent *event) {
    PyObject *content = content_of(event), *made = PyTuple_New(3);
    PyObject *stream_id = PyLong_FromUnsignedLong(event->stream_id);
    PyObject *kind = PyLong_FromLong(event->kind);
    if (!content || !made || !stream_id || !kind) {
        Py_XDECREF(content);
        Py_XDECREF(made);
        Py_XDECREF(stream_id);
        Py_XDECREF(kind);
        return NULL;
    }
    PyTuple_SetItem(made, 0, stream_id);
    PyTuple_SetItem(made, 1, kind);
    PyTuple_SetItem(made, 2, content);
    return made;
}

/* Returns the session's events as a list, and forgets them. */
static PyObject *taken_events(CoreSession *self) {
    Session *session = &self->session;
    PyObject *events = is_sound(self) ? PyList_New((Py_ssize_t)session->event_count) : NULL;
    for (size_t n = 0; events && n < session->event_count; n++) {
        PyObject *event = event_of(&session->events[n]);
        if (!event || PyList_SetItem(events, (Py_ssize_t)n, event)) Py_CLEAR(events);
    }
    session_forget_read(session);
    return events;
}

static PyObject *session_py_receive(CoreSession *self, PyObject *data) {
    Py_buffer view;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)) return NULL;
    session_receive(&self->session, view.buf, (size_t)view.len);
    PyObject *events = taken_events(self);
    PyBuffer_Release(&view);
    return events;
}

static PyObject *session_py_tick(CoreSession *self, PyObject *Py_UNUSED(none)) {
    session_tick(&self->session);
    return taken_events(self);
}

static PyObject *session_py_data_to_send(CoreSession *self, PyObject *Py_UNUSED(none)) {
    Connection *connection = &self->session.connection;
    connection_pump(connection);
    if (!is_sound(self)) return NULL;
    PyObject *data = bytes_of((Text){buffer_content(&connection->out), buffer_length(&connection->out)});
    if (!data) return NULL;
    if (buffer_length(&connection->out)) connection->is_due = false;
    buffer_clear(&connection->out);
    return data;
}

/* What is left to do: the bits of extproc.http2.leftovers. */
#define KEPT_BACK 1
#define OVER 2
#define FAULTY 4

static bool is_due(const Connection *connection) {
    return connection->is_due || connection->ready.first;
}

static bool has_unsent(const Connection *connection) {
    return buffer_length(&connection->out) || connection->ready.first;
}

static long left_of(const Connection *connection) {
    return (has_unsent(connection) && !is_due(connection) ? KEPT_BACK : 0) |
           (connection_is_over(connection) ? OVER : 0) | (connection->has_failed ? FAULTY : 0);
}

/* `write` may call the session again: what it gets has been taken out before. */
static PyObject *session_py_send(CoreSession *self, PyObject *write) {
    const Connection *connection = &self->session.connection;
    bool has_more = true;
    while (has_more && is_due(connection)) {
        PyObject *data = session_py_data_to_send(self, NULL);
        if (!data) return NULL;
        has_more = PyBytes_Size(data) > 0;
        PyObject *written =
            has_more ? PyObject_CallFunctionObjArgs(write, data, NULL) : constant(Py_None);
        Py_DECREF(data);
        if (!written) return NULL;
        Py_DECREF(written);
    }
    return PyLong_FromLong(left_of(connection));
}

static PyObject *session_py_answer(CoreSession *self, PyObject *const *given, Py_ssize_t count) {
    uint32_t stream_id;
    char *message;
    Py_ssize_t length;
    if (!arguments_are(count, 2) || !stream_of(given[0], &stream_id) ||
        PyBytes_AsStringAndSize(given[1], &message, &length))
        return NULL;
    int64_t queued =
        session_answer(&self->session, stream_id, (const uint8_t *)message, (size_t)length);
    return is_sound(self) ? PyLong_FromLongLong(queued) : NULL;
}

static PyObject *session_py_finish(CoreSession *self, PyObject *const *given, Py_ssize_t count) {
    uint32_t stream_id;
    if (!arguments_are(count, 3) || !stream_of(given[0], &stream_id)) return NULL;
    long status = PyLong_AsLong(given[1]);
    if (status == -1 && PyErr_Occurred()) return NULL;
    if (status < 0 || status > 99) {
        PyErr_SetString(PyExc_ValueError, "no status of gRPC");
        return NULL;
    }
    PyObject *encoded = PyUnicode_AsEncodedString(given[2], "utf-8", "replace");
    if (!encoded) return NULL;
    session_finish(&self->session, stream_id, (int)status, (const uint8_t *)PyBytes_AsString(encoded),
                   (size_t)PyBytes_Size(encoded));
    Py_DECREF(encoded);
    return is_sound(self) ? constant(Py_None) : NULL;
}

static PyObject *session_py_queued(CoreSession *self, PyObject *number) {
    uint32_t stream_id;
    if (!stream_of(number, &stream_id)) return NULL;
    return PyLong_FromLongLong(session_queued(&self->session, stream_id));
}

static PyObject *session_py_hold(CoreSession *self, PyObject *number) {
    uint32_t stream_id;
    if (!stream_of(number, &stream_id)) return NULL;
    session_hold(&self->session, stream_id);
    return constant(Py_None);
}

static PyObject *session_py_unhold(CoreSession *self, PyObject *number) {
    uint32_t stream_id;
    if (!stream_of(number, &stream_id)) return NULL;
    session_unhold(&self->session, stream_id);
    return is_sound(self) ? constant(Py_None) : NULL;
}

static PyObject *session_py_pause_sending(CoreSession *self, PyObject *Py_UNUSED(none)) {
    self->session.connection.is_paused = true;
    return constant(Py_None);
}

static PyObject *session_py_resume_sending(CoreSession *self, PyObject *Py_UNUSED(none)) {
    self->session.connection.is_paused = false;
    return constant(Py_None);
}

static PyObject *session_py_drain(CoreSession *self, PyObject *Py_UNUSED(none)) {
    connection_drain(&self->session.connection);
    return is_sound(self) ? constant(Py_None) : NULL;
}

static PyObject *session_py_close(CoreSession *self, PyObject *Py_UNUSED(none)) {
    session_close(&self->session);
    return constant(Py_None);
}

static PyObject *truth(bool is_so) { return constant(is_so ? Py_True : Py_False); }

static PyObject *session_py_is_due(CoreSession *self, void *Py_UNUSED(closure)) {
    return truth(is_due(&self->session.connection));
}

static PyObject *session_py_has_unsent(CoreSession *self, void *Py_UNUSED(closure)) {
    return truth(has_unsent(&self->session.connection));
}

static PyObject *session_py_is_over(CoreSession *self, void *Py_UNUSED(closure)) {
    return truth(connection_is_over(&self->session.connection));
}

static PyObject *session_py_stream_count(CoreSession *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->session.connection.open_count);
}

static PyObject *session_py_fault(CoreSession *self, void *Py_UNUSED(closure)) {
    const Connection *connection = &self->session.connection;
    if (!connection->has_failed) return constant(Py_None);
    return Py_BuildValue("(is)", (int)connection->fault_code, connection->fault_text);
}

#define SESSION(name, how) {#name, (PyCFunction)(void (*)(void))session_py_##name, how, NULL}
#define VALUE(name) {#name, (getter)session_py_##name, NULL, NULL, NULL}

static PyMethodDef session_methods[] = {
    SESSION(receive, METH_O),          SESSION(tick, METH_NOARGS),
    SESSION(data_to_send, METH_NOARGS), SESSION(answer, METH_FASTCALL),
    SESSION(finish, METH_FASTCALL),    SESSION(queued, METH_O),
    SESSION(hold, METH_O),             SESSION(unhold, METH_O),
    SESSION(pause_sending, METH_NOARGS), SESSION(resume_sending, METH_NOARGS),
    SESSION(drain, METH_NOARGS),       SESSION(close, METH_NOARGS),
    SESSION(send, METH_O),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef session_values[] = {
    VALUE(is_due),       VALUE(has_unsent), VALUE(is_over),
    VALUE(stream_count), VALUE(fault),      {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot session_slots[] = {
    {Py_tp_doc, "The compiled session; extproc.http2.session.Session describes it."},
    {Py_tp_new, session_new},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_methods, session_methods},
    {Py_tp_getset, session_values},
    {0, NULL},
};

static PyType_Spec session_spec = {"extproc._core.CompiledSession", sizeof(CoreSession), 0,
                                   Py_TPFLAGS_DEFAULT, session_slots};

/* --- the decoder of messages --- */

/* Names of headers: a tuple, and their texts. */
typedef struct {
    PyObject *names;
    Text *texts;
    Py_ssize_t count;
} HeaderNames;

/* names: of the headers that are asked for; every: of those of which every value is. */
typedef struct {
    PyObject_HEAD
    PyObject *record; /* the class of what is returned */
    HeaderNames names, every;
} CoreDecoder;

/* A header's text is cut at this length (extproc.serving.proxy_message.TEXT_BYTES). */
#define TEXT_BYTES 1024u

static void free_names(HeaderNames *names) {
    Py_XDECREF(names->names);
    PyMem_Free(names->texts);
}

static void decoder_dealloc(CoreDecoder *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->record);
    free_names(&self->names);
    free_names(&self->every);
    PyObject_Free(self);
    Py_DECREF(type);
}

static bool take_names(HeaderNames *taken, PyObject *names) {
    taken->names = constant(names);
    taken->count = PyTuple_Size(names);
    taken->texts = PyMem_Malloc(sizeof(Text) * (size_t)(taken->count + 1));
    if (!taken->texts) return PyErr_NoMemory() != NULL;
    for (Py_ssize_t n = 0; n < taken->count; n++) {
        Py_ssize_t length;
        const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, n), &length);
        if (!name) return false;
        taken->texts[n] = (Text){(const uint8_t *)name, (size_t)length};
    }
    return true;
}

static PyObject *decoder_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    PyObject *record, *names, *every;
    if (!PyArg_ParseTuple(arguments, "OO!O!", &record, &PyTuple_Type, &names, &PyTuple_Type,
                          &every))
        return NULL;
    CoreDecoder *self = (CoreDecoder *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->record = constant(record);
    if (take_names(&self->names, names) && take_names(&self->every, every)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Returns the name of a header that is asked for (borrowed), NULL of another. */
static PyObject *name_of(const HeaderNames *names, Text key) {
    for (Py_ssize_t n = 0; n < names->count; n++)
        if (names->texts[n].length == key.length &&
            !memcmp(names->texts[n].bytes, key.bytes, key.length))
            return PyTuple_GetItem(names->names, n);
    return NULL;
}

/* Envoy fills raw_value, other proxies value (core/v3/base.proto). */
static PyObject *text_of(const ProxyHeader *header) {
    Text text = header->raw_value.length ? header->raw_value : header->value;
    size_t length = text.length < TEXT_BYTES ? text.length : TEXT_BYTES;
    return PyUnicode_DecodeUTF8((const char *)text.bytes, (Py_ssize_t)length, "replace");
}

static PyObject *headers_of(const CoreDecoder *self, Text rest) {
    PyObject *headers = PyDict_New();
    ProxyHeader header;
    while (headers && message_next_header(&rest, &header)) {
        PyObject *name = header.key.length ? name_of(&self->names, header.key) : NULL;
        if (!name) continue;
        PyObject *text = text_of(&header);
        if (!text || PyDict_SetItem(headers, name, text)) Py_CLEAR(headers);
        Py_XDECREF(text);
    }
    return headers;
}

/* Adds a value to those of its header; false if there is no memory. */
static bool add_value(PyObject *values, PyObject *name, Text text) {
    PyObject *value = bytes_of(text), *found = PyDict_GetItem(values, name);
    PyObject *list = found ? constant(found) : PyList_New(0);
    bool is_added = value && list && !PyList_Append(list, value) &&
                    (found || !PyDict_SetItem(values, name, list));
    Py_XDECREF(value);
    Py_XDECREF(list);
    return is_added;
}

/* Returns all values, as they came, of the headers of which every value is asked for. */
static PyObject *values_of(const CoreDecoder *self, const ProxyMessage *message) {
    PyObject *values = PyDict_New();
    bool are_headers = message->kind == REQUEST_HEADERS || message->kind == RESPONSE_HEADERS;
    Text rest = are_headers && self->every.count ? message->headers : (Text){0};
    ProxyHeader header;
    while (values && message_next_header(&rest, &header)) {
        PyObject *name = header.key.length ? name_of(&self->every, header.key) : NULL;
        Text text = header.raw_value.length ? header.raw_value : header.value;
        if (name && text.length && !add_value(values, name, text)) Py_CLEAR(values);
    }
    return values;
}

static PyObject *context_of(const uint8_t *data, size_t length) {
    Buffer context = {0};
    message_add_context(data, length, &context);
    PyObject *made = context.is_broken
                         ? PyErr_NoMemory()
                         : bytes_of((Text){buffer_content(&context), buffer_length(&context)});
    buffer_free(&context);
    return made;
}

static PyObject *modes_of(const ProxyMessage *message) {
    if (!message->has_modes) return constant(Py_None);
    return Py_BuildValue("(ii)", message->request_mode, message->response_mode);
}

static PyObject *decoder_decode(CoreDecoder *self, PyObject *given) {
    char *data;
    Py_ssize_t length;
    ProxyMessage message;
    if (PyBytes_AsStringAndSize(given, &data, &length)) return NULL;
    if (!message_read((const uint8_t *)data, (size_t)length, &message)) return constant(Py_None);
    PyObject *context =
        message.has_context ? context_of((const uint8_t *)data, (size_t)length) : constant(Py_None);
    PyObject *values =
        Py_BuildValue("(iNNNNNN)", (int)message.kind, headers_of(self, message.headers),
                      bytes_of(message.body), truth(message.is_last), modes_of(&message), context,
                      values_of(self, &message));
    if (!values) return NULL;
    PyObject *made = PyObject_CallObject(self->record, values);
    Py_DECREF(values);
    return made;
}

static PyMethodDef decoder_methods[] = {
    {"decode", (PyCFunction)decoder_decode, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot decoder_slots[] = {
    {Py_tp_doc, "Decodes messages of a proxy; extproc.serving.proxy_message describes it."},
    {Py_tp_new, decoder_new},
    {Py_tp_dealloc, decoder_dealloc},
    {Py_tp_methods, decoder_methods},
    {0, NULL},
};

static PyType_Spec decoder_spec = {"extproc._core.CompiledDecoder", sizeof(CoreDecoder), 0,
                                   Py_TPFLAGS_DEFAULT, decoder_slots};

static PyMethodDef module_functions[] = {
    {"chained", module_chained, METH_VARARGS, NULL},
    {"expected", module_expected, METH_VARARGS, NULL},
    {"recorded", module_recorded, METH_VARARGS, NULL},
    {"weighed", module_weighed, METH_VARARGS, NULL},
    {"held_tokens", module_held, METH_VARARGS, NULL},
    {"drawn", module_drawn, METH_VARARGS, NULL},
    {"lowest", module_lowest, METH_VARARGS, NULL},
    {"plain_chat", module_plain_chat, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled parts of the request path.", -1,
    module_functions, NULL, NULL, NULL, NULL};

/* Adds a type to the module; returns it, borrowed. */
static PyObject *add_type(PyObject *made, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type || PyModule_AddObject(made, name, type)) {
        Py_XDECREF(type);
        return NULL;
    }
    return type;
}

PyMODINIT_FUNC PyInit__core(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    PyObject *budget = add_type(made, "CompiledBudget", &budget_spec);
    if (!budget || !add_type(made, "CompiledSession", &session_spec) ||
        !add_type(made, "CompiledDecoder", &decoder_spec) ||
        !add_type(made, "CompiledColumns", &columns_spec) ||
        !add_type(made, "TurnTable", &turn_table_spec) || !columns_prepare() ||
        !claims_prepare()) {
        Py_DECREF(made);
        return NULL;
    }
    PyObject *pace = add_type(made, "CompiledPace", &pace_spec);
    PyObject *numbers = pace ? add_type(made, "CompiledNumbers", &numbers_spec) : NULL;
    if (!numbers) {
        Py_DECREF(made);
        return NULL;
    }
    numbers_prepare(pace, numbers);
    budget_type = (PyTypeObject *)budget;
    return made;
}
