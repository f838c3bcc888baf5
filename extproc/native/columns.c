/* The type CompiledColumns and the draws of extproc._core: extproc/routing/load_columns.py and
 * extproc/routing/draws.py describe them and have the same in Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "columns.h"
#include "survey.h"

typedef struct {
    WorkerLoad load;
    PyObject *report; /* NULL if it does not count */
    bool is_known;    /* whether the worker has a record */
} Row;

typedef struct {
    PyObject_HEAD
    PyObject *load_class;
    Row *rows;
    Py_ssize_t count;
} CoreColumns;

enum {
    ENDPOINT,
    NAME,
    BOOKINGS,
    BACKLOG_TOKENS,
    BACKLOG_AT,
    LATELY_TOKENS,
    SHARED,
    REPORT,
    OTHERS,
    EXCESS_TOKENS,
    ASKED_AT,
    SPEED,
    SLOWNESS,
    PACE,
    IS_EVEN,
    WORDS
};

static const char *const SPELLED[WORDS] = {
    "endpoint", "name",          "bookings", "backlog_tokens", "backlog_at",
    "lately_tokens", "shared",   "report",   "others",         "excess_tokens",
    "asked_at", "speed",         "slowness", "pace",           "is_even"};

static PyObject *words[WORDS];

/* Reads a number; false if the object has none. */
static bool get_number(PyObject *object, int word, double *number) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    if (!value) return false;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *number != -1.0 || !PyErr_Occurred();
}

static bool get_truth(PyObject *object, int word, bool *truth) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    int is_true = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    *truth = is_true > 0;
    return is_true >= 0;
}

static bool get_count(PyObject *object, int word, double *number) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    Py_ssize_t size = value ? PyObject_Size(value) : -1;
    Py_XDECREF(value);
    *number = (double)size;
    return size >= 0;
}

static bool read_speed(PyObject *state, WorkerRecord *record) {
    PyObject *speed = PyObject_GetAttr(state, words[SPEED]);
    bool is_read = speed && get_number(speed, SLOWNESS, &record->slowness) &&
                   get_number(speed, PACE, &record->pace) &&
                   get_truth(speed, IS_EVEN, &record->is_even);
    Py_XDECREF(speed);
    return is_read;
}

/* Reads a worker's record. report: a new reference, NULL if there is none. */
static bool read_record(PyObject *state, WorkerRecord *record, PyObject **report) {
    *record = (WorkerRecord){0};
    *report = PyObject_GetAttr(state, words[REPORT]);
    if (!*report) return false;
    record->has_report = *report != Py_None;
    bool is_read = get_count(state, BOOKINGS, &record->in_flight) &&
                   get_number(state, BACKLOG_TOKENS, &record->backlog_tokens) &&
                   get_number(state, BACKLOG_AT, &record->backlog_at) &&
                   get_number(state, LATELY_TOKENS, &record->lately_tokens) &&
                   get_number(state, SHARED, &record->shared) && read_speed(state, record);
    if (is_read && record->has_report)
        is_read = get_number(state, OTHERS, &record->others) &&
                  get_number(state, EXCESS_TOKENS, &record->excess_tokens) &&
                  get_number(*report, ASKED_AT, &record->asked_at);
    if (!is_read || !record->has_report) Py_CLEAR(*report);
    return is_read;
}

static bool read_row(PyObject *endpoints, PyObject *worker, const SurveyRules *rules, Row *row) {
    *row = (Row){.load = {.slowness = 1.0}};
    PyObject *endpoint = PyObject_GetAttr(worker, words[ENDPOINT]);
    if (!endpoint) return false;
    PyObject *state = PyDict_GetItemWithError(endpoints, endpoint);
    Py_DECREF(endpoint);
    if (!state) return !PyErr_Occurred();
    WorkerRecord record;
    PyObject *report;
    if (!read_record(state, &record, &report)) return false;
    row->is_known = true;
    row->load = survey_load(&record, rules);
    if (row->load.counts)
        row->report = report;
    else
        Py_XDECREF(report);
    return true;
}

static void columns_dealloc(CoreColumns *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t n = 0; n < self->count; n++) Py_XDECREF(self->rows[n].report);
    PyMem_Free(self->rows);
    Py_XDECREF(self->load_class);
    PyObject_Free(self);
    Py_DECREF(type);
}

static bool read_rows(CoreColumns *self, PyObject *endpoints, PyObject *workers,
                      const SurveyRules *rules) {
    Py_ssize_t count = PySequence_Size(workers);
    if (count < 0) return false;
    self->rows = PyMem_Malloc(sizeof(Row) * (size_t)(count + 1));
    if (!self->rows) return PyErr_NoMemory() != NULL;
    while (self->count < count) {
        PyObject *worker = PySequence_GetItem(workers, self->count);
        bool is_read = worker && read_row(endpoints, worker, rules, &self->rows[self->count]);
        Py_XDECREF(worker);
        if (!is_read) return false;
        self->count++;
    }
    return true;
}

static PyObject *columns_new(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    PyObject *load_class, *endpoints, *workers;
    SurveyRules rules;
    if (!PyArg_ParseTuple(given, "OO!O(dddddd)", &load_class, &PyDict_Type, &endpoints, &workers,
                          &rules.now, &rules.rate, &rules.capacity_tokens,
                          &rules.common_slowness, &rules.utilization_seconds,
                          &rules.report_seconds))
        return NULL;
    CoreColumns *self = (CoreColumns *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(load_class);
    self->load_class = load_class;
    if (read_rows(self, endpoints, workers, &rules)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

static Py_ssize_t columns_length(PyObject *self) { return ((CoreColumns *)self)->count; }

static PyObject *columns_item(PyObject *object, Py_ssize_t at) {
    const CoreColumns *self = (CoreColumns *)object;
    if (at < 0 || at >= self->count) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    const Row *row = &self->rows[at];
    const WorkerLoad *load = &row->load;
    if (!row->is_known) return PyObject_CallNoArgs(self->load_class);
    PyObject *others = row->report ? PyFloat_FromDouble(load->others)
                                   : PyLong_FromDouble(load->others); /* they are counted */
    PyObject *report = row->report ? row->report : Py_None;
    PyObject *values = Py_BuildValue("(ndNdOdd)", (Py_ssize_t)load->in_flight, load->backlog_tokens,
                                     others, load->utilization, report, load->age_seconds,
                                     load->slowness);
    PyObject *made = values ? PyObject_CallObject(self->load_class, values) : NULL;
    Py_XDECREF(values);
    return made;
}

/* typical(count): the mean utilization of the first ones, and the least queue in tokens. */
static PyObject *columns_typical(CoreColumns *self, PyObject *given) {
    Py_ssize_t count = PyLong_AsSsize_t(given);
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (count < 1 || count > self->count) {
        PyErr_SetString(PyExc_ValueError, "not so many workers");
        return NULL;
    }
    double used = 0.0, least = Py_HUGE_VAL;
    for (Py_ssize_t n = 0; n < count; n++) {
        const WorkerLoad *load = &self->rows[n].load;
        double queued = load->backlog_tokens * load->slowness;
        used += load->utilization;
        if (queued < least) least = queued;
    }
    return Py_BuildValue("(dd)", used / (double)count, least);
}

static PyObject *columns_costs(CoreColumns *self, PyObject *given) {
    double uncached, running;
    if (!PyArg_ParseTuple(given, "dd", &uncached, &running)) return NULL;
    PyObject *costs = PyList_New(self->count);
    for (Py_ssize_t n = 0; costs && n < self->count; n++) {
        PyObject *cost = PyFloat_FromDouble(survey_cost(&self->rows[n].load, uncached, running));
        if (!cost || PyList_SetItem(costs, n, cost)) Py_CLEAR(costs);
    }
    return costs;
}

static PyObject *columns_requests(CoreColumns *self, PyObject *Py_UNUSED(none)) {
    PyObject *requests = PyList_New(self->count);
    for (Py_ssize_t n = 0; requests && n < self->count; n++) {
        const WorkerLoad *load = &self->rows[n].load;
        PyObject *each = PyFloat_FromDouble(load->in_flight + load->others);
        if (!each || PyList_SetItem(requests, n, each)) Py_CLEAR(requests);
    }
    return requests;
}

/* Adds to a cost the weighed tokens of its worker, if it has any; false after an error. */
static bool add_tokens(const Row *row, PyObject *costs, Py_ssize_t at, PyObject *worker,
                       PyObject *tokens, double weight) {
    PyObject *name = PyObject_GetAttr(worker, words[NAME]);
    PyObject *more = name ? PyDict_GetItemWithError(tokens, name) : NULL;
    Py_XDECREF(name);
    if (!more) return !PyErr_Occurred();
    double added = weight * PyFloat_AsDouble(more) * row->load.slowness;
    double cost = PyFloat_AsDouble(PyList_GetItem(costs, at));
    if (PyErr_Occurred()) return false;
    PyObject *sum = PyFloat_FromDouble(cost + added);
    return sum && !PyList_SetItem(costs, at, sum);
}

/* add(costs, workers, tokens, weight) */
static PyObject *columns_add(CoreColumns *self, PyObject *given) {
    PyObject *costs, *workers, *tokens;
    double weight;
    if (!PyArg_ParseTuple(given, "O!OO!d", &PyList_Type, &costs, &workers, &PyDict_Type, &tokens,
                          &weight))
        return NULL;
    if (PyList_Size(costs) != self->count || PySequence_Size(workers) != self->count) {
        PyErr_SetString(PyExc_ValueError, "other workers");
        return NULL;
    }
    for (Py_ssize_t n = 0; n < self->count; n++) {
        PyObject *worker = PySequence_GetItem(workers, n);
        bool is_added = worker && add_tokens(&self->rows[n], costs, n, worker, tokens, weight);
        Py_XDECREF(worker);
        if (!is_added) return NULL;
    }
    Py_IncRef(Py_None);
    return Py_None;
}

static PyMethodDef columns_methods[] = {
    {"typical", (PyCFunction)columns_typical, METH_O, NULL},
    {"costs", (PyCFunction)columns_costs, METH_VARARGS, NULL},
    {"requests", (PyCFunction)columns_requests, METH_NOARGS, NULL},
    {"add", (PyCFunction)columns_add, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot columns_slots[] = {
    {Py_tp_doc, "Compiled columns; extproc.routing.load_columns describes them."},
    {Py_tp_new, columns_new},
    {Py_tp_dealloc, columns_dealloc},
    {Py_tp_methods, columns_methods},
    {Py_sq_length, columns_length},
    {Py_sq_item, columns_item},
    {0, NULL},
};

PyType_Spec columns_spec = {"extproc._core.CompiledColumns", sizeof(CoreColumns), 0,
                            Py_TPFLAGS_DEFAULT, columns_slots};

/* Returns random(), a number from 0 to below 1; -1 after an error. */
static double drawn_number(PyObject *random) {
    PyObject *value = PyObject_CallNoArgs(random);
    double number = value ? PyFloat_AsDouble(value) : -1.0;
    Py_XDECREF(value);
    if (number >= 0.0 && number < 1.0) return number;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not from 0 to below 1");
    return -1.0;
}

/* drawn(places, count, random): as many different places, in the order in which they were drawn. */
PyObject *module_drawn(PyObject *Py_UNUSED(module), PyObject *given) {
    PyObject *places, *random;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(given, "OnO", &places, &count, &random)) return NULL;
    Py_ssize_t number = PySequence_Size(places);
    PyObject *drawn = number < 0 ? NULL : PyDict_New();
    while (drawn && PyDict_Size(drawn) < count) {
        double chance = drawn_number(random);
        PyObject *place =
            chance < 0.0 ? NULL : PySequence_GetItem(places, (Py_ssize_t)(chance * (double)number));
        if (!place || PyDict_SetItem(drawn, place, Py_None)) Py_CLEAR(drawn);
        Py_XDECREF(place);
    }
    PyObject *made = drawn ? PyDict_Keys(drawn) : NULL;
    Py_XDECREF(drawn);
    return made;
}

/* Returns each rank with a random number and its place, sorted. */
static PyObject *ranked(PyObject *ranks, PyObject *random) {
    Py_ssize_t count = PySequence_Size(ranks);
    PyObject *rows = count < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t n = 0; rows && n < count; n++) {
        double chance = drawn_number(random);
        PyObject *rank = chance < 0.0 ? NULL : PySequence_GetItem(ranks, n);
        PyObject *row = rank ? Py_BuildValue("(Ndn)", rank, chance, n) : NULL;
        if (!row || PyList_SetItem(rows, n, row)) Py_CLEAR(rows);
    }
    if (rows && PyList_Sort(rows)) Py_CLEAR(rows);
    return rows;
}

/* lowest(ranks, count, random): the places of the lowest ranks, ties in random order. */
PyObject *module_lowest(PyObject *Py_UNUSED(module), PyObject *given) {
    PyObject *ranks, *random;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(given, "OnO", &ranks, &count, &random)) return NULL;
    PyObject *rows = ranked(ranks, random);
    if (!rows) return NULL;
    if (count > PyList_Size(rows)) count = PyList_Size(rows);
    PyObject *places = PyList_New(count < 0 ? 0 : count);
    for (Py_ssize_t n = 0; places && n < count; n++) {
        PyObject *place = PyTuple_GetItem(PyList_GetItem(rows, n), 2);
        Py_XINCREF(place);
        if (!place || PyList_SetItem(places, n, place)) Py_CLEAR(places);
    }
    Py_DECREF(rows);
    return places;
}

bool columns_prepare(void) {
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
