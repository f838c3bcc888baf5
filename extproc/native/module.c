/* The Python module extproc._core: checks and converts, then calls the session.
 *
 * extproc/_core.pyi describes the interface. What the module has for messages is in decoder.c, for
 * the routing in columns.c, mark_table.c and numbers.c, for the tokens in turn_table.c and
 * id_list.c. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "columns.h"
#include "decoder.h"
#include "id_list.h"
#include "mark_table.h"
#include "objects.h"
#include "numbers.h"
#include "session.h"
#include "turn_table.h"

static bool arguments_are(Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return true;
    PyErr_Format(PyExc_TypeError, "wants %zd arguments, got %zd", wanted, given);
    return false;
}

/* --- the budget --- */

typedef struct {
    PyObject_HEAD
    Amount amount;
    PyObject *whole; /* of a peer's share; else NULL */
} CoreBudget;

static PyTypeObject *budget_type;

static PyObject *budget_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    long long max_bytes;
    if (!PyArg_ParseTuple(arguments, "L", &max_bytes)) return NULL;
    CoreBudget *self = (CoreBudget *)PyType_GenericAlloc(type, 0);
    if (self) self->amount = (Amount){max_bytes, 0, NULL};
    return (PyObject *)self;
}

static PyObject *budget_share(PyObject *of, PyObject *Py_UNUSED(none)) {
    CoreBudget *self = (CoreBudget *)of;
    CoreBudget *share = (CoreBudget *)PyType_GenericAlloc(budget_type, 0);
    if (!share) return NULL;
    share->amount = (Amount){self->amount.max_bytes, 0, &self->amount};
    Py_INCREF(of);
    share->whole = of;
    return (PyObject *)share;
}

static void budget_dealloc(CoreBudget *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->whole);
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
    amount_give_back(&self->amount, bytes);
    return constant(Py_None);
}

static PyObject *budget_max_bytes(CoreBudget *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->amount.max_bytes);
}

static PyObject *budget_used_bytes(CoreBudget *self, void *Py_UNUSED(closure)) {
    return PyLong_FromLongLong(self->amount.used_bytes);
}

static PyMethodDef budget_methods[] = {
    {"share", budget_share, METH_NOARGS, NULL},
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
    {Py_tp_doc, "A limit of bytes for all together; the stub describes it."},
    {Py_tp_new, budget_new},
    {Py_tp_dealloc, budget_dealloc},
    {Py_tp_methods, budget_methods},
    {Py_tp_getset, budget_values},
    {0, NULL},
};

static PyType_Spec budget_spec = {"extproc._core.Budget", sizeof(CoreBudget), 0,
                                  Py_TPFLAGS_DEFAULT, budget_slots};

/* --- the session --- */

typedef struct {
    PyObject_HEAD
    Session session;
    PyObject *budget;
    PyObject *path, *decoder; /* of the calls whose messages are read; NULL if none are */
} CoreSession;

/* reading: None, or extproc.http2.method_decoder.MethodDecoder. */
static bool take_reading(CoreSession *self, PyObject *reading) {
    char *path;
    Py_ssize_t length;
    if (reading == Py_None) return true;
    PyObject *named = PySequence_GetItem(reading, 0), *decoder = PySequence_GetItem(reading, 1);
    self->path = named;
    self->decoder = decoder;
    if (!named || !decoder || PyBytes_AsStringAndSize(named, &path, &length)) return false;
    if (!is_decoder(decoder)) {
        PyErr_SetString(PyExc_TypeError, "wants a compiled decoder");
        return false;
    }
    self->session.read_path = (Text){(const uint8_t *)path, (size_t)length};
    return true;
}

/* values: those of extproc.http2.limits.Limits, in its order. */
static bool limits_of(PyObject *values, Limits *limits) {
    int64_t *const fields[] = {
        &limits->max_streams,           &limits->max_header_block_bytes,
        &limits->max_header_list_bytes, &limits->max_continuations,
        &limits->stream_window_bytes,   &limits->connection_window_bytes,
        &limits->pings_a_tick,          &limits->settings_a_tick,
        &limits->idle_frames_a_tick,    &limits->idle_frames_a_stream,
        &limits->rapid_resets_a_tick,   &limits->faults_a_tick,
        &limits->preface_ticks,         &limits->first_ticks,
        &limits->stall_ticks,
    };
    Py_ssize_t count = (Py_ssize_t)(sizeof fields / sizeof *fields);
    if (!arguments_are(PyTuple_Size(values), count)) return false;
    for (Py_ssize_t n = 0; n < count; n++)
        *fields[n] = PyLong_AsLongLong(PyTuple_GetItem(values, n));
    return !PyErr_Occurred();
}

static PyObject *session_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(named)) {
    PyObject *values, *budget, *reading;
    long long max_message_bytes;
    Limits limits;
    if (!PyArg_ParseTuple(arguments, "O!LO!O", &PyTuple_Type, &values, &max_message_bytes,
                          budget_type, &budget, &reading) ||
        !limits_of(values, &limits))
        return NULL;
    CoreSession *self = (CoreSession *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    session_init(&self->session, &limits, max_message_bytes, &((CoreBudget *)budget)->amount);
    Py_INCREF(budget);
    self->budget = budget;
    if (take_reading(self, reading)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static void session_dealloc(CoreSession *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->budget) {
        session_close(&self->session);
        session_free(&self->session);
        Py_DECREF(self->budget);
    }
    Py_XDECREF(self->path);
    Py_XDECREF(self->decoder);
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

/* A message as the decoder reads it, or its bytes if the decoder gives up. */
static PyObject *message_of(const CoreSession *self, Text message) {
    PyObject *read = decoder_read(self->decoder, message);
    return read || PyErr_Occurred() ? read : bytes_of(message);
}

/* The path and the trace of a new call; the path by which messages are read is made once. */
static PyObject *head_of_call(const CoreSession *self, const CallEvent *event) {
    PyObject *path = event->is_read ? constant(self->path) : bytes_of(event->bytes);
    PyObject *trace = bytes_of(event->trace);
    PyObject *made = path && trace ? PyTuple_Pack(2, path, trace) : NULL;
    Py_XDECREF(path);
    Py_XDECREF(trace);
    return made;
}

/* What comes with an event: of a new call its path and trace, of a failed one status and text. */
static PyObject *content_of(const CoreSession *self, const CallEvent *event) {
    switch (event->kind) {
    case CALL_OPENED:
        return head_of_call(self, event);
    case CALL_PART:
        return bytes_of(event->bytes);
    case CALL_MESSAGE:
        return event->is_read ? message_of(self, event->bytes) : bytes_of(event->bytes);
    case CALL_FAILED: {
        char text[100];
        int length = PyOS_snprintf(text, sizeof text, event->text, event->length);
        return Py_BuildValue("(is#)", event->status, text, (Py_ssize_t)length);
    }
    default:
        return constant(Py_None);
    }
}

static PyObject *event_of(const CoreSession *self, const CallEvent *event) {
    PyObject *content = content_of(self, event), *made = PyTuple_New(3);
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
        PyObject *event = event_of(self, &session->events[n]);
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
#define MORE 8

/* Most times that `send` writes: then others have their turn. */
#define MAX_WRITES 4

static bool is_due(const Connection *connection) {
    return connection->is_due || connection->ready.first;
}

static bool has_unsent(const Connection *connection) {
    return buffer_length(&connection->out) || connection->ready.first;
}

static long left_of(const Connection *connection, bool has_more) {
    return (has_more ? MORE : 0) | (has_unsent(connection) && !is_due(connection) ? KEPT_BACK : 0) |
           (connection_is_over(connection) ? OVER : 0) | (connection->has_failed ? FAULTY : 0);
}

/* `write` may call the session again: what it gets has been taken out before. */
static PyObject *session_py_send(CoreSession *self, PyObject *write) {
    const Connection *connection = &self->session.connection;
    bool has_more = true;
    for (int writes = 0; writes < MAX_WRITES && has_more && is_due(connection); writes++) {
        PyObject *data = session_py_data_to_send(self, NULL);
        if (!data) return NULL;
        has_more = PyBytes_Size(data) > 0;
        PyObject *written =
            has_more ? PyObject_CallFunctionObjArgs(write, data, NULL) : constant(Py_None);
        Py_DECREF(data);
        if (!written) return NULL;
        Py_DECREF(written);
    }
    return PyLong_FromLong(left_of(connection, has_more && is_due(connection)));
}

static void give_back(void *owner) { Py_DECREF((PyObject *)owner); }

static bool text_of(PyObject *given, Text *text) {
    char *bytes;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &bytes, &length)) return false;
    *text = (Text){(const uint8_t *)bytes, (size_t)length};
    return true;
}

/* Reads extproc.http2.messages.LongMessage, of which the body is lent. */
static bool long_message_of(PyObject *given, Text *before, Loan *loan, Text *behind) {
    PyObject *written, *body, *rest;
    Py_ssize_t end;
    if (!PyArg_ParseTuple(given, "SSnS", &written, &body, &end, &rest) ||
        !text_of(written, before) || !text_of(body, &loan->bytes) || !text_of(rest, behind))
        return false;
    if (end < 0 || (size_t)end > loan->bytes.length) {
        PyErr_SetString(PyExc_ValueError, "out of bounds");
        return false;
    }
    loan->bytes.length = (size_t)end;
    loan->owner = body;
    Py_INCREF(body);
    return true;
}

/* answer(stream, message): the message is bytes, or a tuple that is a long message. */
static PyObject *session_py_answer(CoreSession *self, PyObject *const *given, Py_ssize_t count) {
    uint32_t stream_id;
    if (!arguments_are(count, 2) || !stream_of(given[0], &stream_id)) return NULL;
    Text message, behind;
    int64_t queued;
    if (PyTuple_Check(given[1])) {
        Loan loan = {.give_back = give_back};
        if (!long_message_of(given[1], &message, &loan, &behind)) return NULL;
        queued = session_lend(&self->session, stream_id, message, loan, behind);
    } else {
        if (!text_of(given[1], &message)) return NULL;
        queued = session_answer(&self->session, stream_id, message.bytes, message.length);
    }
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
    Py_ssize_t letters = PyUnicode_GetLength(given[2]);
    if (letters < 0) return NULL;
    if (!letters) { /* as mostly */
        session_finish(&self->session, stream_id, (int)status, NULL, 0);
        return is_sound(self) ? constant(Py_None) : NULL;
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
    {Py_tp_doc, "The gRPC calls of one connection; the stub describes it."},
    {Py_tp_new, session_new},
    {Py_tp_dealloc, session_dealloc},
    {Py_tp_methods, session_methods},
    {Py_tp_getset, session_values},
    {0, NULL},
};

static PyType_Spec session_spec = {"extproc._core.Session", sizeof(CoreSession), 0,
                                   Py_TPFLAGS_DEFAULT, session_slots};

/* --- a header block of another server --- */

/* Most bytes of its fields. */
#define MAX_ANSWER_LIST_BYTES (32u * 1024u)

/* Adds a field to a list, which is NULL after an error. */
static void add_header_field(void *taker, Text name, Text value) {
    PyObject **fields = taker;
    PyObject *field = *fields ? PyTuple_New(2) : NULL;
    PyObject *first = field ? bytes_of(name) : NULL, *second = first ? bytes_of(value) : NULL;
    if (second) {
        PyTuple_SetItem(field, 0, constant(first));
        PyTuple_SetItem(field, 1, constant(second));
        if (PyList_Append(*fields, field)) Py_CLEAR(*fields);
    } else {
        Py_CLEAR(*fields);
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(field);
}

/* header_fields(block): the fields of a block that begins a connection. */
static PyObject *module_header_fields(PyObject *Py_UNUSED(module), PyObject *given) {
    char *block;
    Py_ssize_t length;
    if (PyBytes_AsStringAndSize(given, &block, &length)) return NULL;
    PyObject *fields = PyList_New(0);
    Hpack hpack;
    hpack_init(&hpack, MAX_ANSWER_LIST_BYTES);
    HpackResult result =
        hpack_decode(&hpack, (const uint8_t *)block, (size_t)length, add_header_field, &fields);
    hpack_free(&hpack);
    if (result != HPACK_DONE && fields) {
        Py_CLEAR(fields);
        PyErr_SetString(PyExc_ValueError, "undecodable header block");
    }
    return fields;
}

#define FUNCTION(name, function) \
    {#name, (PyCFunction)(void (*)(void))module_##function, METH_FASTCALL, NULL}

static PyMethodDef module_functions[] = {
    FUNCTION(expected, expected),
    FUNCTION(load_of, load_of),
    FUNCTION(evicted, evicted),
    FUNCTION(drawn, drawn),
    FUNCTION(lowest, lowest),
    {"header_fields", module_header_fields, METH_O, NULL},
    {"id_list", module_id_list, METH_O, NULL},
    {"plain_chat", module_plain_chat, METH_VARARGS, NULL},
    {"turn_texts", module_turn_texts, METH_VARARGS, NULL},
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
    PyObject *budget = add_type(made, "Budget", &budget_spec);
    if (!budget || !add_type(made, "Session", &session_spec) ||
        !decoder_add(made) ||
        !add_type(made, "LoadColumns", &columns_spec) ||
        !add_type(made, "TurnTable", &turn_table_spec) || !columns_prepare()) {
        Py_DECREF(made);
        return NULL;
    }
    PyObject *marks = add_type(made, "MarkTable", &mark_table_spec);
    if (!marks || !mark_table_prepare(marks)) {
        Py_DECREF(made);
        return NULL;
    }
    PyObject *pace = add_type(made, "Pace", &pace_spec);
    PyObject *numbers = pace ? add_type(made, "LoadNumbers", &numbers_spec) : NULL;
    if (!numbers) {
        Py_DECREF(made);
        return NULL;
    }
    numbers_prepare(pace, numbers);
    budget_type = (PyTypeObject *)budget;
    return made;
}
