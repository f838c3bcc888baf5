/* The types CompiledPace and CompiledNumbers of extproc._core: extproc/routing/load_numbers.py
 * describes them and has the same in Python. */
#define PY_SSIZE_T_CLEAN
#include "numbers.h"
#include "objects.h"

#include <math.h>
#include <structmember.h>

typedef struct {
    PyObject_HEAD
    double slowness, pace;
    char is_even;
} CorePace;

typedef struct {
    PyObject_HEAD
    PyObject *pace; /* a CorePace */
    long long in_flight, shared, shared_tokens;
    double backlog_tokens, backlog_at, lately_tokens, booked_tokens, sent_tokens, others,
        excess_tokens, asked_at;
} CoreNumbers;

static PyTypeObject *pace_type, *numbers_type;

void numbers_prepare(PyObject *pace, PyObject *numbers) {
    pace_type = (PyTypeObject *)pace;
    numbers_type = (PyTypeObject *)numbers;
}

static PyObject *none(void) {
    Py_IncRef(Py_None); /* kvstate/native/module.c says why */
    return Py_None;
}

/* --- the pace --- */

static PyObject *pace_new(PyTypeObject *type, PyObject *Py_UNUSED(given),
                          PyObject *Py_UNUSED(named)) {
    CorePace *self = (CorePace *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->slowness = self->pace = 1.0;
    self->is_even = 1;
    return (PyObject *)self;
}

static void pace_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_object(self);
    Py_DECREF(type);
}

static PyMemberDef pace_members[] = {
    {"slowness", T_DOUBLE, offsetof(CorePace, slowness), 0, NULL},
    {"pace", T_DOUBLE, offsetof(CorePace, pace), 0, NULL},
    {"is_even", T_BOOL, offsetof(CorePace, is_even), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pace_slots[] = {
    {Py_tp_doc, "A compiled pace; extproc.routing.load_numbers describes it."},
    {Py_tp_new, pace_new},
    {Py_tp_dealloc, pace_dealloc},
    {Py_tp_members, pace_members},
    {0, NULL},
};

PyType_Spec pace_spec = {"extproc._core.CompiledPace", sizeof(CorePace), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, pace_slots};

/* --- the numbers --- */

static PyObject *numbers_new(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    PyObject *pace;
    if (!PyArg_ParseTuple(given, "O!", pace_type, &pace)) return NULL;
    CoreNumbers *self = (CoreNumbers *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(pace);
    self->pace = pace;
    self->backlog_at = self->asked_at = -INFINITY;
    return (PyObject *)self;
}

static int numbers_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(((CoreNumbers *)object)->pace);
    Py_VISIT((PyObject *)Py_TYPE(object));
    return 0;
}

static int numbers_clear(PyObject *object) {
    Py_CLEAR(((CoreNumbers *)object)->pace);
    return 0;
}

static void numbers_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    (void)numbers_clear(self);
    free_object(self);
    Py_DECREF(type);
}

static double passed_until(const CoreNumbers *self, double now) {
    double passed = now - self->backlog_at;
    return passed > 0.0 ? passed : 0.0;
}

static double lately_at(const CoreNumbers *self, double now, double window) {
    return self->lately_tokens * exp(-passed_until(self, now) / window);
}

static double backlog_at_time(const CoreNumbers *self, double now, double rate) {
    double pace = self->pace ? ((CorePace *)self->pace)->pace : 1.0;
    double left = self->backlog_tokens - passed_until(self, now) * rate * pace;
    return left > 0.0 ? left : 0.0;
}

static void bound(CoreNumbers *self, double backlog, double now, double window) {
    double most = self->booked_tokens + (double)self->shared_tokens;
    self->lately_tokens = lately_at(self, now, window);
    self->backlog_tokens = most < backlog ? most : backlog;
    self->backlog_at = now;
}

/* backlog(now, rate) */
static PyObject *numbers_backlog(CoreNumbers *self, PyObject *given) {
    double now, rate;
    if (!PyArg_ParseTuple(given, "dd", &now, &rate)) return NULL;
    return PyFloat_FromDouble(backlog_at_time(self, now, rate));
}

/* lately(now, window) */
static PyObject *numbers_lately(CoreNumbers *self, PyObject *given) {
    double now, window;
    if (!PyArg_ParseTuple(given, "dd", &now, &window)) return NULL;
    return PyFloat_FromDouble(lately_at(self, now, window));
}

/* begin(tokens, now, rate, window) */
static PyObject *numbers_begin(CoreNumbers *self, PyObject *given) {
    double each[4];
    if (!numbers_of(given, each, 4)) return NULL;
    double tokens = each[0], now = each[1], rate = each[2], window = each[3];
    double left = backlog_at_time(self, now, rate);
    self->in_flight++;
    self->lately_tokens = lately_at(self, now, window) + tokens;
    self->backlog_tokens = left + tokens;
    self->backlog_at = now;
    self->booked_tokens += tokens;
    self->sent_tokens += tokens;
    return PyFloat_FromDouble(left);
}

/* leave(tokens, is_last) */
static PyObject *numbers_leave(CoreNumbers *self, PyObject *given) {
    double tokens;
    int is_last;
    if (!PyArg_ParseTuple(given, "dp", &tokens, &is_last)) return NULL;
    self->booked_tokens -= is_last ? self->booked_tokens : tokens;
    return none();
}

/* end(now, rate, window) */
static PyObject *numbers_end(CoreNumbers *self, PyObject *given) {
    double each[3];
    if (!numbers_of(given, each, 3)) return NULL;
    double now = each[0], rate = each[1], window = each[2];
    self->in_flight--;
    bound(self, backlog_at_time(self, now, rate), now, window);
    return none();
}

/* bound(backlog, now, window) */
static PyObject *numbers_bound(CoreNumbers *self, PyObject *given) {
    double backlog, now, window;
    if (!PyArg_ParseTuple(given, "ddd", &backlog, &now, &window)) return NULL;
    bound(self, backlog, now, window);
    return none();
}

static PyMethodDef numbers_methods[] = {
    {"backlog", (PyCFunction)numbers_backlog, METH_VARARGS, NULL},
    {"lately", (PyCFunction)numbers_lately, METH_VARARGS, NULL},
    {"begin", (PyCFunction)numbers_begin, METH_VARARGS, NULL},
    {"leave", (PyCFunction)numbers_leave, METH_VARARGS, NULL},
    {"end", (PyCFunction)numbers_end, METH_VARARGS, NULL},
    {"bound", (PyCFunction)numbers_bound, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define NUMBER(name, type) {#name, type, offsetof(CoreNumbers, name), 0, NULL}

static PyMemberDef numbers_members[] = {
    NUMBER(in_flight, T_LONGLONG),    NUMBER(shared, T_LONGLONG),
    NUMBER(shared_tokens, T_LONGLONG), NUMBER(backlog_tokens, T_DOUBLE),
    NUMBER(backlog_at, T_DOUBLE),     NUMBER(lately_tokens, T_DOUBLE),
    NUMBER(booked_tokens, T_DOUBLE),  NUMBER(sent_tokens, T_DOUBLE),
    NUMBER(others, T_DOUBLE),         NUMBER(excess_tokens, T_DOUBLE),
    NUMBER(asked_at, T_DOUBLE),       {NULL, 0, 0, 0, NULL},
};

static PyType_Slot numbers_slots[] = {
    {Py_tp_doc, "Compiled numbers of a load; extproc.routing.load_numbers describes them."},
    {Py_tp_new, numbers_new},
    {Py_tp_dealloc, numbers_dealloc},
    {Py_tp_traverse, numbers_traverse},
    {Py_tp_clear, numbers_clear},
    {Py_tp_methods, numbers_methods},
    {Py_tp_members, numbers_members},
    {0, NULL},
};

PyType_Spec numbers_spec = {"extproc._core.CompiledNumbers", sizeof(CoreNumbers), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, numbers_slots};

bool numbers_read(PyObject *object, WorkerRecord *record) {
    if (!PyObject_TypeCheck(object, numbers_type)) {
        PyErr_SetString(PyExc_TypeError, "not the numbers of a load");
        return false;
    }
    const CoreNumbers *numbers = (CoreNumbers *)object;
    const CorePace *pace = (CorePace *)numbers->pace;
    *record = (WorkerRecord){
        .in_flight = (double)numbers->in_flight,
        .backlog_tokens = numbers->backlog_tokens,
        .backlog_at = numbers->backlog_at,
        .lately_tokens = numbers->lately_tokens,
        .shared = (double)numbers->shared,
        .others = numbers->others,
        .excess_tokens = numbers->excess_tokens,
        .asked_at = numbers->asked_at,
        .slowness = pace ? pace->slowness : 1.0,
        .pace = pace ? pace->pace : 1.0,
        .is_even = !pace || pace->is_even,
        .has_report = numbers->asked_at > -INFINITY,
    };
    return true;
}
